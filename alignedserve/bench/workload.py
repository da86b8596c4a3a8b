"""What to send and when: a plan made from a trace or from a few numbers, with an explicit random stream.

The grammar of `--synthetic`, for one or several classes of traffic:

    rt: rate=2, cv=1.5, prompt=lognormal(100,300), output=60, ttft=1, tpot=0.1; be: outstanding=4, prompt=800, output=9

- `name:` may be left out; it only labels the class.
- `rate=R` opens the loop: R requests per second whatever the server does, with gaps of coefficient of variation
  `cv` (1, the default: Poisson; 0: evenly spaced; others: Gamma). `outstanding=N` closes it: N requests in the air,
  each followed by another when it ends.
- `prompt` and `output` are tokens: a number, `uniform(low,high)`, `exponential(mean)`, `choice(a,b,...)`, or
  `lognormal(median,p95)`.
- `ttft`, `tpot`, `deadline` are the objectives of the class in seconds; `tier` is sent as `service_tier`.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import merge
from itertools import islice, takewhile

from alignedserve.bench.grammar import ClassSpec, parse_classes
from alignedserve.bench.traces import TraceRow
from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Slo

DEFAULT_NUM_REQUESTS = 100
NO_SLO = Slo()


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """Requests that share objectives and a row in the report."""

    name: str
    slo: Slo = NO_SLO
    tier: str | None = None  # sent as service_tier
    outstanding: int | None = None  # closed loop with that many in the air; None: open loop


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send. `arrival_s` counts from the start of the run; in a closed loop it is the earliest moment."""

    index: int  # unique within the plan
    class_name: str
    arrival_s: float
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A class that keeps `outstanding` requests in the air, and the endless stream they come from."""

    traffic: TrafficClass
    requests: Iterator[PlannedRequest]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the load generator needs to know.

    Open requests go out at their arrival. Closed loops run until `ends_s`, until `max_closed` requests were
    sent, or, when both are None, until the last open request was sent.
    """

    classes: tuple[TrafficClass, ...]
    open_requests: tuple[PlannedRequest, ...]
    closed_loops: tuple[ClosedLoop, ...] = ()
    ends_s: float | None = None
    max_closed: int | None = None
    num_clamped_prompts: int = 0
    num_clamped_outputs: int = 0


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Scales first, then clamps."""

    prompt_scale: float = 1.0
    output_scale: float = 1.0
    max_prompt: int | None = None
    max_output: int | None = None

    def prompt_len(self, length: int) -> int:
        """The length to send for a traced or drawn prompt length."""
        return _limited(length * self.prompt_scale, self.max_prompt)

    def output_len(self, length: int) -> int:
        """The length to ask for."""
        return _limited(length * self.output_scale, self.max_output)


def _limited(length: float, limit: int | None) -> int:
    return max(1, round(length) if limit is None else min(limit, round(length)))


# --- from a trace -----------------------------------------------------------------------------------------------------


def plan_trace(rows: list[TraceRow], traffic: TrafficClass, limits: LengthLimits, num_requests: int | None) -> Plan:
    """The trace as one open-loop class."""
    chosen = rows[:num_requests]
    requests = tuple(
        PlannedRequest(
            index, traffic.name, row.arrival_s, limits.prompt_len(row.prompt_len), limits.output_len(row.output_len)
        )
        for index, row in enumerate(chosen)
    )
    free = replace(limits, max_prompt=None, max_output=None)
    return Plan(
        classes=(traffic,),
        open_requests=requests,
        num_clamped_prompts=sum(
            free.prompt_len(row.prompt_len) > sent.prompt_len for row, sent in zip(chosen, requests, strict=True)
        ),
        num_clamped_outputs=sum(
            free.output_len(row.output_len) > sent.output_len for row, sent in zip(chosen, requests, strict=True)
        ),
    )


# --- from a few numbers -----------------------------------------------------------------------------------------------


def plan_synthetic(
    specification: str,
    *,
    seed: int,
    num_requests: int | None,
    duration_s: float | None,
    limits: LengthLimits,
) -> Plan:
    """A plan from the grammar above. Raises ConfigError.

    `num_requests` counts open-loop requests (closed ones when there is no open class); `duration_s` ends both kinds.
    Without either, DEFAULT_NUM_REQUESTS.
    """
    specs = parse_classes(specification)
    if num_requests is None and duration_s is None:
        num_requests = DEFAULT_NUM_REQUESTS
    classes = tuple(_traffic_class(spec) for spec in specs)
    streams = [
        _stream(spec, random.Random(f"{seed}/{spec.name}"), limits)  # noqa: S311 - a workload, not a secret
        for spec in specs
    ]
    pairs = list(zip(classes, streams, strict=True))
    opened: Iterator[PlannedRequest] = merge(
        *(stream for traffic, stream in pairs if traffic.outstanding is None), key=lambda request: request.arrival_s
    )
    if duration_s is not None:
        opened = takewhile(lambda request: request.arrival_s < duration_s, opened)
    requests = tuple(replace(request, index=index) for index, request in enumerate(islice(opened, num_requests)))
    closed = [
        ClosedLoop(traffic, _numbered(stream, first=len(requests) + rank, step=len(pairs)))
        for rank, (traffic, stream) in enumerate(pairs)
        if traffic.outstanding is not None
    ]
    only_closed = len(closed) == len(pairs)
    return Plan(classes, requests, tuple(closed), duration_s, num_requests if only_closed else None)


def _traffic_class(spec: ClassSpec) -> TrafficClass:
    return TrafficClass(spec.name, Slo(spec.ttft_s, spec.tpot_s, spec.deadline_s), spec.tier, spec.outstanding)


def _stream(spec: ClassSpec, rng: random.Random, limits: LengthLimits) -> Iterator[PlannedRequest]:
    """Endless; `index` is filled in later, when the classes are merged."""
    arrival_s = 0.0
    gap = arrival_gaps(spec.rate, spec.cv, rng) if spec.rate is not None else None
    while True:
        if gap is not None:
            arrival_s += gap()
        prompt_len = limits.prompt_len(round(spec.prompt.draw(rng)))
        output_len = limits.output_len(round(spec.output.draw(rng)))
        yield PlannedRequest(-1, spec.name, arrival_s, prompt_len, output_len)


def _numbered(stream: Iterator[PlannedRequest], *, first: int, step: int) -> Iterator[PlannedRequest]:
    """Several closed loops count by turns, so that no two requests share an index."""
    for count, request in enumerate(stream):
        yield replace(request, index=first + count * step)


def arrival_gaps(rate: float, cv: float, rng: random.Random) -> Callable[[], float]:
    """Draws gaps between arrivals with mean 1 / rate and coefficient of variation `cv`."""
    if rate <= 0 or cv < 0:
        raise ConfigError("an arrival process needs a rate above 0 and a cv of at least 0")
    if cv == 0:
        return lambda: 1.0 / rate
    shape = 1.0 / cv**2
    return lambda: rng.gammavariate(shape, 1.0 / (rate * shape))
