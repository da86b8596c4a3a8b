"""Plan of the requests to send, made from a trace or from a line in the language of workloads.

The language is that of lab.workload.grammar (docs/workloads.md). What a client cannot send is refused.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Slo
from lab.workload.build import build_workload
from lab.workload.catalogue import Library
from lab.workload.distributions import LengthLimits, ValueDistribution
from lab.workload.grammar import ClassSpec, ClientLimit, parse_classes
from lab.workload.requests import RequestSource, TimedRequest
from lab.workload.traces import TraceRow

NO_SLO = Slo()


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """Requests that share objectives and a row in the report."""

    name: str
    slo: Slo = NO_SLO
    tier: str | None = None  # sent as service_tier
    outstanding: int | None = None  # closed loop with that many in the air; None: open loop


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send. `arrival_s` counts from the start of the run; in a closed loop it is the earliest moment."""

    index: int  # unique within the plan
    class_name: str
    arrival_s: float
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class PlannedLoop:
    """A class that keeps `outstanding` requests in the air, and the endless stream they come from."""

    traffic: TrafficClass
    requests: Iterator[LoadRequest]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Requests, loops and end of one run, as the load generator needs them.

    Open requests go out at their arrival. Closed loops run until `ends_s`, until `max_closed` requests were
    sent, or, when both are None, until the last open request was sent.
    """

    classes: tuple[TrafficClass, ...]
    open_requests: tuple[LoadRequest, ...]
    closed_loops: tuple[PlannedLoop, ...] = ()
    ends_s: float | None = None
    max_closed: int | None = None
    num_clamped_prompts: int = 0
    num_clamped_outputs: int = 0


# --- from a trace -----------------------------------------------------------------------------------------------------


def plan_trace(rows: list[TraceRow], traffic: TrafficClass, limits: LengthLimits, num_requests: int | None) -> LoadPlan:
    """Return the trace as one open-loop class. Raises ConfigError where the trace has objectives of its own."""
    chosen = rows[:num_requests]
    if any(row.terms is not None for row in chosen):
        raise ConfigError("the trace states classes or objectives per request, which this command cannot send")
    prompts = np.array([row.prompt_len for row in chosen], dtype=np.int64)
    outputs = np.array([row.output_len for row in chosen], dtype=np.int64)
    prompt_lens, output_lens = limits.prompt_lens(prompts), limits.output_lens(outputs)
    free = replace(limits, max_prompt=None, max_output=None)
    return LoadPlan(
        classes=(traffic,),
        open_requests=tuple(
            LoadRequest(index, traffic.name, row.arrival_s, prompt_len, output_len)
            for index, (row, prompt_len, output_len) in enumerate(
                zip(chosen, prompt_lens.tolist(), output_lens.tolist(), strict=True)
            )
        ),
        num_clamped_prompts=int((free.prompt_lens(prompts) > prompt_lens).sum()),
        num_clamped_outputs=int((free.output_lens(outputs) > output_lens).sum()),
    )


# --- from the language of workloads -----------------------------------------------------------------------------------


def plan_synthetic(
    specification: str,
    *,
    seed: int,
    num_requests: int | None,
    duration_s: float | None,
    limits: LengthLimits,
    library: Library | None = None,
) -> LoadPlan:
    """Return a plan from a specification. Raises ConfigError.

    `num_requests` counts open-loop requests (closed ones when there is no open class); `duration_s` ends both kinds.
    `limits` apply after those of the specification. Without a `library`, only what ships with the package is known.
    """
    classes = tuple(_traffic_class(spec) for spec in parse_classes(specification))
    workload = build_workload(
        specification,
        seed=seed,
        library=library or Library(),
        num_requests=num_requests,
        duration_s=duration_s,
    )
    requests = tuple(_planned(index, request, limits) for index, request in enumerate(workload.requests))
    by_name = {traffic.name: traffic for traffic in classes}
    closed = tuple(
        PlannedLoop(
            by_name[loop.class_name],
            _numbered(loop.stream, limits, first=len(requests) + rank, step=len(workload.closed_loops)),
        )
        for rank, loop in enumerate(workload.closed_loops)
    )
    return LoadPlan(classes, requests, closed, duration_s, workload.max_closed)


def _traffic_class(spec: ClassSpec) -> TrafficClass:
    unsent = {
        "wave": spec.wave is not None,
        "be_share": spec.be_share > 0,
        "priority": spec.priority != 0,
        "max_tokens": spec.max_tokens is not ClientLimit.CONTEXT,
        "predict": spec.prediction is not None,
        "turns": spec.turns > 1,
        "instruction": spec.instruction is not None,
        "hours": spec.hours is not None,
        "not_before": spec.not_before_s > 0,
        "encoder": spec.encoder > 0,
    }
    for key, is_set in unsent.items():
        if is_set:
            raise ConfigError(f"{spec.name}: {key}= is for simulations; a client does not send it")
    slo = Slo(*(_fixed(spec, distribution) for distribution in (spec.ttft_s, spec.tpot_s, spec.deadline_s)))
    return TrafficClass(spec.name, slo, spec.tier, spec.outstanding)


def _fixed(spec: ClassSpec, distribution: ValueDistribution | None) -> float | None:
    if distribution is not None and distribution.constant is None:
        raise ConfigError(f"{spec.name}: objectives drawn per request are for simulations; give a number")
    return None if distribution is None else distribution.constant


def _planned(index: int, request: TimedRequest, limits: LengthLimits) -> LoadRequest:
    return LoadRequest(
        index=index,
        class_name=request.class_name,
        arrival_s=request.arrival_s,
        prompt_len=int(limits.prompt_lens(np.asarray(request.prompt_len))),
        output_len=int(limits.output_lens(np.asarray(request.output_len))),
    )


def _numbered(stream: RequestSource, limits: LengthLimits, *, first: int, step: int) -> Iterator[LoadRequest]:
    for count in itertools.count():
        yield _planned(first + count * step, stream[count], limits)
