"""Objectives that depend on what the servers can do, so that no specification can hold them."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np

from alignedserve.core.request import RequestClass
from lab.workload.distributions import ValueDistribution
from lab.workload.requests import TimedRequest, Workload, in_every_turn, turns_of

PROMPT_GROUP = 512  # tokens


def with_ttft_from_prefill(
    workload: Workload, prefill_s: Callable[[int], float], *, scale: ValueDistribution, seed: int
) -> Workload:
    """Return the workload with TTFT objectives as AccelGen sets them (section 3), for its open-loop real-time requests.

    Prompts are grouped by PROMPT_GROUP tokens; the objective is the mean of `prefill_s(prompt_len)` over the group
    times a scale drawn per request (the paper: uniform(0.5,1.5)).
    """
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for request in chain.from_iterable(map(turns_of, workload.requests)):
        groups[_group(request)].append(prefill_s(request.prompt_len))
    means = {group: sum(seconds) / len(seconds) for group, seconds in groups.items()}
    scales = scale.draw(np.random.default_rng(seed), len(workload.requests)).tolist()
    requests = tuple(
        in_every_turn(request, partial(_with_ttft, means=means, factor=factor))
        for request, factor in zip(workload.requests, scales, strict=True)
    )
    return replace(workload, requests=requests)


def _group(request: TimedRequest) -> int:
    return (request.prompt_len - 1) // PROMPT_GROUP


def _with_ttft(request: TimedRequest, means: Mapping[int, float], factor: float) -> TimedRequest:
    if request.request_class is RequestClass.BEST_EFFORT:
        return request
    return replace(request, slo=replace(request.slo, ttft_s=means[_group(request)] * factor))
