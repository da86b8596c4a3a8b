"""Cost models fitted to the iterations and copies of a recorded run."""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import RecordingError
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.linear import (
    BENDS,
    FitError,
    LinearCoefficients,
    LinearIterationModel,
    Sample,
    feature_rows,
    fit_error,
    fit_linear,
    nonnegative_least_squares,
)
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.straggler import straggler_in
from alignedserve.costmodel.work import IterationWork
from lab.replay.observed import ObservedCopy, ObservedIteration, ObservedRun
from lab.sim.config import NO_SLOWDOWNS, SimLinks, Slowdowns

_RUN_LENGTH = 256  # a shared machine is slow for seconds, and policies learn it meanwhile


class Ratio(NamedTuple):
    """Measured by expected time of an iteration, and whether it had a part of a prompt."""

    value: float
    has_prompt: bool = False


class JitteryCosts:
    """Cost model for engines, which multiplies each iteration's cost by a measured ratio.

    Ratios come in runs as they were recorded, each run from a place drawn by the seed; an iteration with a prompt takes
    the next ratio of one with a prompt, as these vary less, and any other the next of one without. Not for policies,
    which need the expected cost.
    """

    def __init__(self, costs: CostModel, ratios: Sequence[Ratio], seed: int | str) -> None:
        assert ratios, "nothing to draw from"
        self._costs = costs
        self._ratios = ratios
        self._next = {has_prompt: _next_of(ratios, has_prompt=has_prompt) for has_prompt in (False, True)}
        self._random = random.Random(seed)  # noqa: S311
        self._place = 0
        self._num_left = 0

    def iteration_s(self, work: IterationWork) -> float:
        if not self._num_left:
            self._place, self._num_left = self._random.randrange(len(self._ratios)), _RUN_LENGTH
        index = self._next[work.num_chunks > 0][self._place]
        self._place = (index + 1) % len(self._ratios)
        self._num_left -= 1
        return self._ratios[index].value * self._costs.iteration_s(work)

    def swap_s(self, num_tokens: float) -> float:
        return self._costs.swap_s(num_tokens)


def _next_of(ratios: Sequence[Ratio], *, has_prompt: bool) -> list[int]:
    places = [index for index, ratio in enumerate(ratios) if ratio.has_prompt is has_prompt]
    if not places:
        return list(range(len(ratios)))
    following, coming = places[0], [0] * len(ratios)
    for index in reversed(range(len(ratios))):
        if ratios[index].has_prompt is has_prompt:
            following = index
        coming[index] = following
    return coming


_FASTEST = 1e12  # bytes per second of a link whose larger copies took no longer
_MIN_SAMPLES = 20
_NUM_REWEIGHTINGS = 10
_PREFIXES = (("decode-", "worker-"), ("prefill-",))  # of workers' names, by kind
_SLOWDOWNS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5)  # at 1.0 two on the same core
_NUM_DESCENTS = 2  # over all slowdowns, one at a time
_MAX_FITTED = 1500  # iterations, to find them


@dataclass(frozen=True, slots=True)
class WorkerFit:
    """Costs of one kind of worker's iterations. `ratios`: measured by expected, by worker."""

    costs: LinearIterationModel
    error: FitError  # on the iterations that were fitted
    ratios: Mapping[str, tuple[Ratio, ...]]


@dataclass(frozen=True, slots=True)
class MachineFit:
    """Costs for a simulation of the recorded machine."""

    decode: WorkerFit
    prefill: WorkerFit | None  # None: colocated workers
    links: SimLinks
    slowdowns: Slowdowns
    measured: Mapping[str, tuple[Sample, ...]]  # by worker: what it measured before it served
    unmeasured: LinearIterationModel  # the part of an iteration that engines do not measure


def fit_machine(run: ObservedRun, block_bytes: int) -> MachineFit:
    """Fit the costs of a run that was observed completely. Raises RecordingError if it has too few iterations."""
    workers = [_iterations_of(run.iterations, prefixes) for prefixes in _PREFIXES]
    if len(workers[0].iterations) < _MIN_SAMPLES or 0 < len(workers[1].iterations) < _MIN_SAMPLES:
        raise RecordingError(
            f"{sum(len(worker.iterations) for worker in workers)} iterations are too few to fit costs to"
        )
    links = SimLinks(
        host=_fit_link([copy for copy in run.copies if copy.has_pool_end], block_bytes),
        device=_fit_link([copy for copy in run.copies if not copy.has_pool_end], block_bytes),
        message_s=_median_s(run.message_times_s()),
        submit_s=_median_s(run.submit_times_s()),
        token_s=0.0,  # recorded times of tokens are those of their workers
        submit_times_s=tuple(max(time_s, 0.0) for time_s in run.submit_times_s()),
    )
    slowdowns = _fit_slowdowns(workers) if _are_several(run) else NO_SLOWDOWNS
    straggler = straggler_in(chain.from_iterable(run.measured.values())).share
    decode, prefill = (_fit_worker(worker, slowdowns, straggler) if worker.iterations else None for worker in workers)
    assert decode is not None, "checked above"
    return MachineFit(decode, prefill, links, slowdowns, run.measured, fit_unmeasured(run.iterations))


def fit_mean(samples: Sequence[Sample], bends: Sequence[float] = BENDS, straggler: float = 0.0) -> LinearIterationModel:
    """Fit the expected time of an iteration, with errors weighted by the expected time, not the measured one.

    Weighted by the measured time (fit_linear, the starting point), iterations that the machine delayed count for less
    than others, and the sum of all comes out too small.
    """
    first = fit_linear(samples, bends=bends, straggler=straggler)
    form = first.coefficients.form
    rows = feature_rows(samples, form)
    seconds = np.array([sample.seconds for sample in samples])
    expected: npt.NDArray[np.float64] = np.array([first.iteration_s(sample.work) for sample in samples])
    weights = np.zeros(rows.shape[1])
    for _ in range(_NUM_REWEIGHTINGS):
        weights = nonnegative_least_squares(rows / expected[:, None], seconds / expected)
        expected = rows @ weights
    return LinearIterationModel(LinearCoefficients.of(weights.tolist(), form))


def fit_unmeasured(iterations: Sequence[ObservedIteration]) -> LinearIterationModel:
    """Fit what an iteration takes beside its engine's time: deciding, threads, records; some for each request."""
    rows = np.array([(1.0, iteration.work.num_decodes) for iteration in iterations]).reshape(-1, 2)
    seconds = np.array([max(iteration.seconds - iteration.engine_s, 0.0) for iteration in iterations])
    base_s, request_s = nonnegative_least_squares(rows, seconds).tolist()
    return LinearIterationModel(LinearCoefficients(base_s=base_s, decode_s=request_s))


@dataclass(frozen=True, slots=True)
class _WorkerIterations:
    """Iterations of one kind of worker.

    `shares`: the share of each in which the others ran decodes, and iterations with prompts [iterations, 2].
    """

    iterations: tuple[ObservedIteration, ...]
    num_others: int
    shares: npt.NDArray[np.float64]

    def alone(self, slowdowns: Slowdowns) -> list[Sample]:
        has_prompt = np.array([iteration.work.num_chunks > 0 for iteration in self.iterations], np.int64)
        table = np.array(slowdowns).reshape(2, 2)[has_prompt]
        factors = 1.0 - self.shares.sum(axis=1) + (self.shares / (1.0 + table * self.num_others)).sum(axis=1)
        return [
            Sample(iteration.work, factor * iteration.seconds)
            for iteration, factor in zip(self.iterations, factors.tolist(), strict=True)
        ]

    def thinned(self) -> "_WorkerIterations":
        step = -(-len(self.iterations) // _MAX_FITTED) or 1
        return _WorkerIterations(self.iterations[::step], self.num_others, self.shares[::step])


def _iterations_of(iterations: Sequence[ObservedIteration], prefixes: tuple[str, ...]) -> _WorkerIterations:
    by_worker: dict[str, list[ObservedIteration]] = {}
    for iteration in iterations:
        if iteration.seconds > 0.0:
            by_worker.setdefault(iteration.worker, []).append(iteration)
    chosen = tuple(iteration for name, theirs in by_worker.items() if name.startswith(prefixes) for iteration in theirs)
    shares = np.zeros((len(chosen), 2))
    spans = np.array([(iteration.started_s, iteration.ended_s) for iteration in chosen]).reshape(-1, 2)
    for name, theirs in by_worker.items():
        is_other = np.array([iteration.worker != name for iteration in chosen], np.float64)
        for kind in (0, 1):
            edges = _edges_of([their for their in theirs if (their.work.num_chunks > 0) == kind])
            if len(edges):
                shares[:, kind] += is_other * _shared_s(spans, edges)
    num_others = max(len(by_worker) - 1, 1)
    shares /= num_others * (spans[:, 1:] - spans[:, :1])
    shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1.0)  # a prompt may have run within decodes
    return _WorkerIterations(chosen, num_others, shares)


def _edges_of(iterations: Sequence[ObservedIteration]) -> npt.NDArray[np.float64]:
    edges: list[tuple[float, float]] = []
    for observed in sorted(iterations, key=lambda iteration: iteration.started_s):
        if not edges or observed.ended_s > edges[-1][1]:
            edges.append((observed.started_s, observed.ended_s))
    return np.array(edges)


def _shared_s(spans: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    busy_s = np.repeat(np.cumsum(edges[:, 1] - edges[:, 0]), 2)
    busy_s[::2] -= edges[:, 1] - edges[:, 0]
    shared: npt.NDArray[np.float64] = np.diff(np.interp(spans.ravel(), edges.ravel(), busy_s).reshape(-1, 2))[:, 0]
    return shared


def _are_several(run: ObservedRun) -> bool:
    return len({iteration.worker for iteration in run.iterations}) > 1


def _fit_slowdowns(workers: Sequence[_WorkerIterations]) -> Slowdowns:
    thinned = [worker.thinned() for worker in workers if worker.iterations]
    best = min(map(Slowdowns.alike, _SLOWDOWNS), key=lambda slowdowns: _misfit(thinned, slowdowns))
    for _ in range(_NUM_DESCENTS):
        for field in Slowdowns._fields:
            trials = [best._replace(**{field: slowdown}) for slowdown in _SLOWDOWNS]
            best = min(trials, key=lambda slowdowns: _misfit(thinned, slowdowns))
    return best


def _misfit(workers: Sequence[_WorkerIterations], slowdowns: Slowdowns) -> float:
    sizes: dict[bool, list[float]] = {}
    for worker in workers:
        samples = worker.alone(slowdowns)
        for ratio in _ratios(fit_mean(samples, bends=()), samples):
            sizes.setdefault(ratio.has_prompt, []).append(abs(math.log(ratio.value)))
    return sum(map(statistics.fmean, sizes.values()))


def _fit_worker(worker: _WorkerIterations, slowdowns: Slowdowns, straggler: float) -> WorkerFit:
    samples = worker.alone(slowdowns)
    costs = fit_mean(samples, straggler=straggler)
    ratios: dict[str, list[Ratio]] = {}
    for iteration, ratio in zip(worker.iterations, _ratios(costs, samples), strict=True):
        ratios.setdefault(iteration.worker, []).append(ratio)
    return WorkerFit(costs, fit_error(costs, samples), {name: tuple(of_name) for name, of_name in ratios.items()})


def _ratios(costs: LinearIterationModel, samples: Sequence[Sample]) -> list[Ratio]:
    return [Ratio(sample.seconds / costs.iteration_s(sample.work), sample.work.num_chunks > 0) for sample in samples]


def _median_s(times: Sequence[float]) -> float:
    return max(statistics.median(times), 0.0) if times else 0.0


def _fit_link(copies: Sequence[ObservedCopy], block_bytes: int) -> LinkModel:
    samples = [(copy.num_blocks * block_bytes, copy.seconds) for copy in copies if copy.num_blocks and copy.seconds > 0]
    if not samples:
        return LinkModel(0.0, _FASTEST)
    sizes, seconds = np.array(samples, np.float64).T
    rows = np.stack([1.0 / seconds, sizes / seconds], axis=1)
    latency_s, byte_s = nonnegative_least_squares(rows, np.ones(len(seconds))).tolist()
    return LinkModel(latency_s, 1.0 / byte_s if byte_s > 1.0 / _FASTEST else _FASTEST)
