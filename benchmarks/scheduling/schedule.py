"""The KV pool's index and its batch formers: what scheduling costs, and how narrow the batches are.

    python -m benchmarks.scheduling.schedule  # targets at 100 000: 5 us a change, 1 ms a batch (p99), 1 KiB a request

A pool is filled with requests of the lengths of a recorded trace or a made-up distribution. Requests are moved and
removed one by one, and batches are formed, taken out and replaced by new arrivals, so that the pool keeps its size.
Only the operation itself is timed, `--rounds` times: on a machine that does other work as well, one round says little.
"""

import itertools
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import RequestId
from alignedserve.core.metrics import percentile
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from kvpool.policies import BATCH_FORMERS, make_batch_former
from kvpool.policies.batch_former import AlignedBatch, BatchFormer, BatchLimits
from kvpool.state import PooledRequest
from lab.workload.traces import shipped_trace

_LONGEST = 65536
_MAX_DRAWS = 1000


def _azure(rng: random.Random) -> Iterator[int]:
    rows = shipped_trace()
    while True:
        row = rng.choice(rows)
        yield row.prompt_len + rng.randint(0, row.output_len)


def _lognormal(rng: random.Random) -> Iterator[int]:
    while True:
        yield min(max(int(rng.lognormvariate(6.5, 1.1)), 1), _LONGEST)


def _uniform(rng: random.Random) -> Iterator[int]:
    while True:
        yield rng.randint(1, _LONGEST)


def _one(rng: random.Random) -> Iterator[int]:
    return itertools.repeat(700)


LENGTHS: dict[str, Callable[[random.Random], Iterator[int]]] = {
    "azure": _azure,
    "lognormal": _lognormal,
    "uniform": _uniform,
    "one": _one,
}


class Arrivals:
    """Requests without end, each later than the one before, and none larger than `max_blocks`.

    First come, first served would stop at one that no batch can hold. Raises ConfigError where there are no others.
    """

    def __init__(self, lengths: str, block_size: int, max_blocks: int, seed: int) -> None:
        self._name = lengths
        self._block_size = block_size
        self._max_len = max_blocks * block_size
        self._lengths = LENGTHS[lengths](random.Random(seed))
        self._numbers = itertools.count()

    def take(self, count: int) -> list[PooledRequest]:
        return [self._make(number) for number in itertools.islice(self._numbers, count)]

    def _make(self, number: int) -> PooledRequest:
        lengths = itertools.islice(self._lengths, _MAX_DRAWS)
        context_len = next((length for length in lengths if length <= self._max_len), None)
        if context_len is None:
            raise ConfigError(f"lengths {self._name!r}: none of {_MAX_DRAWS} is {self._max_len} tokens or less.")
        num_blocks = blocks_for(context_len, self._block_size)
        return PooledRequest(RequestId(f"request-{number:08d}"), context_len, num_blocks, number * 1e-5, None)


Thing = TypeVar("Thing")
_BATCH_EVERY_S = 0.02  # a few decode workers, each with a batch every few dozen iterations


@dataclass(frozen=True, slots=True)
class ScheduleBenchmarkSpec:
    """Parameters of the benchmark."""

    pool_sizes: tuple[int, ...] = (1_000, 10_000, 100_000)
    lengths: str = "azure"  # a name in LENGTHS
    formers: tuple[str, ...] = tuple(sorted(BATCH_FORMERS))
    limits: BatchLimits = field(default_factory=lambda: BatchLimits(1000, 128, 36))
    block_size: int = 16
    starvation_s: float = 2.0
    num_changes: int = 10_000  # removals that are timed; at most as many as there are requests
    num_batches: int = 300
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FormingFigures:
    """One batch former at one pool size. Every field is plain JSON."""

    former: str
    num_pooled: int
    insert_us: float  # medians
    remove_us: float
    index_bytes_per_request: int  # the former with its requests' records, without their ids
    form_p50_ms: float
    form_p99_ms: float
    batch_requests: float  # median
    range_blocks: float  # median of the range of a batch, in blocks of tokens
    range_to_best_p50: float  # by the narrowest range holding as many requests within the limits
    range_to_best_p90: float


def run_schedule_benchmark(spec: ScheduleBenchmarkSpec) -> list[FormingFigures]:
    pairs = itertools.product(spec.pool_sizes, spec.formers)
    return [_measure_forming(spec, name, num_pooled) for num_pooled, name in pairs]


def _arrivals(spec: ScheduleBenchmarkSpec) -> Arrivals:
    return Arrivals(spec.lengths, spec.block_size, spec.limits.max_blocks, spec.seed)


def _measure_forming(spec: ScheduleBenchmarkSpec, name: str, num_pooled: int) -> FormingFigures:
    arrivals = _arrivals(spec)
    requests = arrivals.take(num_pooled)

    def make() -> BatchFormer:
        return make_batch_former(name, block_size=spec.block_size, starvation_s=spec.starvation_s)

    index_bytes = _bytes_held(make, requests)
    former = make()
    insert_us = _median_us(lambda pooled: former.insert(pooled, 0.0), requests)
    sample = _sampled(requests, spec)
    remove_us = _median_us(former.remove, [pooled.request_id for pooled in sample])
    for pooled in sample:
        former.insert(pooled, 0.0)
    batches = _form_batches(spec, former, requests, arrivals)
    form_s = sorted(batch.form_s for batch in batches)
    ratios = sorted(batch.range_to_best for batch in batches if batch.range_to_best is not None)
    return FormingFigures(
        former=name,
        num_pooled=num_pooled,
        insert_us=insert_us,
        remove_us=remove_us,
        index_bytes_per_request=index_bytes // num_pooled,
        form_p50_ms=1e3 * percentile(form_s, 50),
        form_p99_ms=1e3 * percentile(form_s, 99),
        batch_requests=statistics.median(batch.num_requests for batch in batches),
        range_blocks=statistics.median(batch.range_blocks for batch in batches),
        range_to_best_p50=percentile(ratios, 50),
        range_to_best_p90=percentile(ratios, 90),
    )


def _bytes_held(make: Callable[[], BatchFormer], requests: list[PooledRequest]) -> int:
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    former = make()
    for pooled in requests:
        former.insert(replace(pooled), 0.0)  # a record of its own, which counts
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return after - before


def _median_us(change: Callable[[Thing], object], things: list[Thing]) -> float:
    times_ns = []
    for thing in things:
        begin = time.perf_counter_ns()
        change(thing)
        times_ns.append(time.perf_counter_ns() - begin)
    return statistics.median(times_ns) / 1e3


def _sampled(requests: list[PooledRequest], spec: ScheduleBenchmarkSpec) -> list[PooledRequest]:
    rng = random.Random(spec.seed)
    return rng.sample(requests, min(spec.num_changes, len(requests)))


@dataclass(frozen=True, slots=True)
class _Formed:
    form_s: float
    num_requests: int
    range_blocks: int
    range_to_best: float | None  # not worked out for every batch


def _form_batches(
    spec: ScheduleBenchmarkSpec, former: BatchFormer, requests: list[PooledRequest], arrivals: Arrivals
) -> list[_Formed]:
    pool = {pooled.request_id: pooled for pooled in requests}
    compared = set(range(0, spec.num_batches, max(1, spec.num_batches // 60)))
    formed = []
    for number in range(spec.num_batches):
        now = number * _BATCH_EVERY_S
        begin = time.perf_counter()
        batch = former.form(spec.limits, now)
        form_s = time.perf_counter() - begin
        assert batch is not None, "a pool of requests that fit gives no batch"
        ratio = range_to_best(batch, list(pool.values()), spec.limits, spec.block_size) if number in compared else None
        formed.append(_Formed(form_s, len(batch.request_ids), _range_blocks(batch, spec.block_size), ratio))
        for request_id in batch.request_ids:
            former.remove(request_id)
            del pool[request_id]
        for pooled in arrivals.take(len(batch.request_ids)):
            former.insert(pooled, now)
            pool[pooled.request_id] = pooled
    return formed


def _range_blocks(batch: AlignedBatch, block_size: int) -> int:
    return blocks_for(batch.lengths.stop - 1, block_size) - blocks_for(batch.lengths.start, block_size) + 1


def range_to_best(batch: AlignedBatch, pool: list[PooledRequest], limits: BatchLimits, block_size: int) -> float:
    ordered = sorted(pool, key=lambda pooled: pooled.context_len)
    leaves = np.array([blocks_for(pooled.context_len, block_size) for pooled in ordered])
    blocks = np.cumsum([0, *(pooled.num_blocks for pooled in ordered)])
    count = len(batch.request_ids)
    ranges = leaves[count - 1 :] - leaves[: len(leaves) - count + 1] + 1
    fits = blocks[count:] - blocks[:-count] <= limits.max_blocks
    return float(_range_blocks(batch, block_size) / ranges[fits].min())


def measure(lengths: str, rounds: int) -> dict[str, Any]:
    spec = ScheduleBenchmarkSpec(lengths=lengths)
    results = [[asdict(row) for row in run_schedule_benchmark(spec)] for _ in range(rounds)]
    return {"lengths": lengths, **asdict(spec.limits), "forming": _medians(results)}


def _medians(rounds: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [{name: _median([row[name] for row in rows]) for name in rows[0]} for rows in zip(*rounds, strict=True)]


def _median(values: list[Any]) -> Any:
    return round(statistics.median(values), 3) if isinstance(values[0], float) else values[len(values) // 2]


def main() -> None:
    """Measure; print and record."""
    rounds = parser_of(__doc__, rounds=3).parse_args().rounds
    figures = []
    for lengths in LENGTHS:
        figures.append(measure(lengths, rounds))
        for row in figures[-1]["forming"]:
            print(lengths, row)
    print(write_result("scheduling/schedule", figures))


if __name__ == "__main__":
    main()
