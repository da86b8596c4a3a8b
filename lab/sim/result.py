"""The result of a simulation: sums, distributions and sampled curves, small enough to keep many."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from alignedserve.core.metrics import (
    Distribution,
    attainment,
    completed_of_arrived,
    describe,
    per_second,
    percentile,
    stalled,
)
from alignedserve.messages.cluster_view import IterationLogTotals
from alignedserve.messages.gateways import ClusterStatus, Demand, LengthTotals
from lab.sim.engine import IterationLine, SimulatedEngine
from lab.sim.records import GapSample, RequestEnding, RequestRecord
from lab.sim.routers import SimulatedRouter

ALL = "all"  # every class together
NUM_PARTS = 20  # of a run, for its confidence
CURVE_PERCENTS = (*range(100), 99.5, 99.9, 100)


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure over requests or gaps: its distribution, and its curve at `CURVE_PERCENTS`."""

    distribution: Distribution
    curve: tuple[float, ...]


class PartResult(NamedTuple):
    """The requests that were sent in one part of the run."""

    num_sent: int
    num_met: int  # every objective


@dataclass(frozen=True, slots=True)
class ClassResult:
    """Result of one class of requests, or of all. Rates are per second of the whole run; None: nothing to measure."""

    num_sent: int
    num_by_ending: dict[str, int]
    attainment: float | None  # requests that did not complete count as missed
    ttft_attainment: float | None  # by first tokens alone
    tpot_attainment: float | None
    token_attainment: float | None  # share of the tokens with an objective that met it (AccelGen)
    p99_attainment: float | None  # of all objectives, with the 99th percentile of each request's gaps for their mean
    requests_per_s: float
    loaded_requests_per_s: float  # completed while requests still arrived, per second of that time: without the tail
    tokens_per_s: float
    goodput_per_s: float  # requests that met every objective
    timely_tokens_per_s: float  # tokens that met their objective
    ttft_s: Measure | None
    tpot_s: Measure | None
    tbt_s: Measure | None  # over an even sample of all gaps; count and max are exact
    max_tbt_s: Measure | None  # each request's longest gap
    p99_tbt_s: Measure | None  # each request's own percentile
    end_to_end_s: Measure | None
    normalized_s: Measure | None  # end-to-end time by output tokens, of completed requests
    parts: tuple[PartResult, ...] = ()  # of the time of sending, NUM_PARTS of equal length
    loaded_tokens_per_s: float | None = None  # that came during a workload's given time of sending: without the tail
    num_prompt_tokens: int = 0  # of requests that got a token
    num_cached_tokens: int = 0  # of those, that came from the prefix cache
    fluidity: float | None = None  # share of the tokens' deadlines met, time carried over (Etalon)
    completed_of_arrived: float | None = None  # while requests arrive, the first fifth left out; below 1 a queue grows
    longest_gap_s: float | None = None  # of all requests, those too that did not complete
    stalled: float | None = None  # share of the answers that began with a gap longer than metrics.READABLE_GAP_S

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompts' tokens that came from the prefix cache; None without prompts."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else None


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """Result of one worker."""

    name: str
    utilisation: float  # share of the run in which it computed
    num_iterations: int
    num_prompt_tokens: int
    num_decodes: int  # one for each request and iteration
    mean_blocks: float  # held by the requests of an iteration


@dataclass(frozen=True, slots=True)
class RouterResult:
    """Result of one router."""

    name: str
    num_events: int  # that it decided, those before and after the run with them
    utilisation: float  # share of the run in which it decided; 0 where decisions take no time
    max_behind_s: float  # longest time that an event waited for its decision

    @classmethod
    def of(cls, router: SimulatedRouter, busy_s: float, duration_s: float) -> "RouterResult":
        """Summarise a router's run, from the first request to the end of the last."""
        utilisation = busy_s / duration_s if duration_s > 0 else 0.0
        return cls(router.name, router.num_events, utilisation, router.max_behind_s)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of one run. The same configuration, workload and seed give an equal record."""

    duration_s: float  # simulated, from the first request sent to the last ended
    classes: dict[str, ClassResult]  # "all", and each class that occurred
    workers: tuple[WorkerResult, ...]
    routers: tuple[RouterResult, ...]
    max_in_flight: int  # requests sent and not ended, at a time
    num_preemptions: int
    num_evictions: int
    num_handoffs_verified: int
    num_handoffs_refused: int
    num_reused_tokens: int
    num_recomputed_tokens: int
    num_pool_blocks_used: int  # at the end: held by unfinished requests only
    num_worker_blocks_used: int
    iteration_log: IterationLogTotals  # of all decode workers
    lengths: LengthTotals  # predicted and true output lengths
    num_decisions: int  # events passed to logics
    num_events: int  # actions of the event queue
    timeline: tuple[IterationLine, ...]  # of the configured worker
    is_abandoned: bool = False  # ended early, as more requests missed their objectives than the configuration allows

    def to_builtins(self) -> dict[str, Any]:
        """Convert to dicts and lists, for JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def classes_of(
    records: Sequence[RequestRecord],
    gaps: Mapping[str, GapSample],
    duration_s: float,
    loaded_tokens_per_s: Mapping[str, float] | None = None,
) -> dict[str, ClassResult]:
    """Summarise all requests, and those of each class, in order of the names."""
    arrivals_s = [record.arrival_s for record in records]
    span = _Span(duration_s, min(arrivals_s, default=0.0), max(arrivals_s, default=0.0))
    classes = {ALL: _class_of(records, [gaps[name] for name in sorted(gaps)], span)}
    for name in sorted(gaps):
        of_class = [record for record in records if record.class_name == name]
        classes[name] = _class_of(of_class, [gaps[name]], span)
    if loaded_tokens_per_s:
        loaded = {**loaded_tokens_per_s, ALL: sum(loaded_tokens_per_s.values())}
        classes = {name: replace(result, loaded_tokens_per_s=loaded.get(name, 0.0)) for name, result in classes.items()}
    return classes


def worker_of(name: str, engine: SimulatedEngine, duration_s: float) -> WorkerResult:
    return WorkerResult(
        name,
        engine.busy_s / duration_s if duration_s > 0 else 0.0,
        engine.num_iterations,
        engine.num_prompt_tokens,
        engine.num_decodes,
        engine.num_block_iterations / engine.num_iterations if engine.num_iterations else 0.0,
    )


def total_of(statuses: Collection[ClusterStatus]) -> ClusterStatus:
    total = ClusterStatus()
    for status in statuses:
        total = _added(total, status)
    return total


def _added(one: Any, other: Any) -> Any:
    if isinstance(one, IterationLogTotals | Demand):
        return one.plus(other)
    if isinstance(one, msgspec.Struct):
        fields = zip(msgspec.structs.astuple(one), msgspec.structs.astuple(other), strict=True)
        return type(one)(*(_added(a, b) for a, b in fields))
    return one + other


class _Span(NamedTuple):
    duration_s: float
    first_sent_s: float
    last_sent_s: float


def _class_of(records: Sequence[RequestRecord], gaps: Sequence[GapSample], span: _Span) -> ClassResult:
    duration_s, loaded_s = span.duration_s, span.last_sent_s - span.first_sent_s
    completed = [record for record in records if record.ending is RequestEnding.COMPLETED]
    num_met = sum(record.has_met_slo for record in records)
    num_timely = sum(record.num_timely_tokens for record in records)
    num_due, num_in_time = (sum(record.deadlines[place] for record in records) for place in (0, 1))
    gaps_s = _measure_gaps(gaps)
    counts = {ending.value: sum(record.ending is ending for record in records) for ending in RequestEnding}
    return ClassResult(
        num_sent=len(records),
        num_by_ending=counts,
        attainment=attainment(num_met, len(records)),
        ttft_attainment=attainment(sum(record.has_met_ttft for record in records), len(records)),
        tpot_attainment=attainment(sum(record.has_met_tpot for record in records), len(records)),
        token_attainment=attainment(num_timely, sum(record.num_due_tokens for record in records)),
        p99_attainment=attainment(sum(record.has_met_p99 for record in records), len(records)),
        requests_per_s=per_second(len(completed), duration_s),
        loaded_requests_per_s=per_second(sum(record.ended_s <= span.last_sent_s for record in completed), loaded_s),
        tokens_per_s=per_second(sum(record.num_tokens for record in records), duration_s),
        goodput_per_s=per_second(num_met, duration_s),
        timely_tokens_per_s=per_second(num_timely, duration_s),
        ttft_s=_measure(record.ttft_s for record in records),
        tpot_s=_measure(record.tpot_s for record in completed),
        tbt_s=gaps_s,
        max_tbt_s=_measure(record.max_tbt_s for record in completed),
        p99_tbt_s=_measure(record.p99_tbt_s for record in completed),
        end_to_end_s=_measure(record.end_to_end_s for record in completed),
        normalized_s=_measure(record.normalized_s for record in completed),
        parts=_parts_of(records, span),
        num_prompt_tokens=sum(record.prompt_len for record in records if record.num_tokens),
        num_cached_tokens=sum(record.num_cached_tokens for record in records),
        fluidity=attainment(num_in_time, num_due),
        completed_of_arrived=completed_of_arrived(
            [record.arrival_s for record in records], [record.ended_s for record in completed]
        ),
        longest_gap_s=None if gaps_s is None else gaps_s.distribution.max,
        stalled=stalled([record.max_tbt_s or 0.0 for record in records if record.num_tokens]),
    )


def _parts_of(records: Sequence[RequestRecord], span: _Span) -> tuple[PartResult, ...]:
    sent, met = [0] * NUM_PARTS, [0] * NUM_PARTS
    length_s = max(span.last_sent_s - span.first_sent_s, 1e-9) / NUM_PARTS
    for record in records:
        part = min(int((record.arrival_s - span.first_sent_s) / length_s), NUM_PARTS - 1)
        sent[part] += 1
        met[part] += record.has_met_slo
    return tuple(map(PartResult, sent, met))


def _measure(values: Iterable[float | None]) -> Measure | None:
    known = sorted(value for value in values if value is not None)
    distribution = describe(known)
    if distribution is None:
        return None
    return Measure(distribution, tuple(percentile(known, percent) for percent in CURVE_PERCENTS))


def _measure_gaps(samples: Sequence[GapSample]) -> Measure | None:
    step = max((sample.step for sample in samples), default=1)
    measure = _measure(gap for sample in samples for gap in sample.values()[:: step // sample.step])
    if measure is None:
        return None
    exact = replace(
        measure.distribution, count=sum(sample.count for sample in samples), max=max(one.max_s for one in samples)
    )
    return Measure(exact, measure.curve)
