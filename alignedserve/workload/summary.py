"""What a workload looks like in numbers, for people and for reports."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alignedserve.core.metrics import Distribution, describe
from alignedserve.workload.requests import TimedRequest, Workload


@dataclass(frozen=True, slots=True)
class TrafficSummary:
    """The open-loop requests of one class, or of all."""

    name: str
    num_requests: int
    duration_s: float  # between the first and the last arrival
    rate: float | None  # requests per second; None for fewer than two
    cv: float | None  # of the gaps between arrivals
    best_effort_share: float
    prompt_len: Distribution
    output_len: Distribution


def summarise_workload(workload: Workload) -> list[TrafficSummary]:
    """One summary per class with open-loop requests, and of all together where there are several."""
    names = list(dict.fromkeys(request.class_name for request in workload.requests))
    by_class = [[request for request in workload.requests if request.class_name == name] for name in names]
    summaries = [_summary(name, requests) for name, requests in zip(names, by_class, strict=True)]
    return summaries if len(summaries) < 2 else [*summaries, _summary("all", workload.requests)]


def _summary(name: str, requests: Sequence[TimedRequest]) -> TrafficSummary:
    gaps = np.diff([request.arrival_s for request in requests])
    duration_s = float(gaps.sum())
    prompt_len = describe([request.prompt_len for request in requests])
    output_len = describe([request.output_len for request in requests])
    assert prompt_len is not None, "a class without requests"
    assert output_len is not None, "a class without requests"
    return TrafficSummary(
        name=name,
        num_requests=len(requests),
        duration_s=duration_s,
        rate=len(gaps) / duration_s if duration_s > 0 else None,
        cv=float(gaps.std() / gaps.mean()) if duration_s > 0 else None,
        best_effort_share=sum(request.request_class.value == "be" for request in requests) / len(requests),
        prompt_len=prompt_len,
        output_len=output_len,
    )
