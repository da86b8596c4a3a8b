"""Cost models fitted to the iterations and copies of a recorded run."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import RecordingError
from alignedserve.costmodel.least_squares import nonnegative_least_squares
from alignedserve.costmodel.linear import (
    FitError,
    LinearCoefficients,
    LinearIterationModel,
    Sample,
    feature_rows,
    fit_error,
    fit_linear,
)
from alignedserve.costmodel.links import LinkModel
from alignedserve.replay.jitter import Ratio
from alignedserve.replay.observed import ObservedCopy, ObservedIteration, ObservedRun
from alignedserve.sim.config import SimLinks

_FASTEST = 1e12  # bytes per second of a link whose larger copies took no longer
_MIN_SAMPLES = 20
_NUM_REWEIGHTINGS = 10
_PREFIXES = ("decode-", "prefill-")
_SLOWDOWNS = tuple(number / 10 for number in range(21))  # two on the same core take twice as long


@dataclass(frozen=True, slots=True)
class WorkerFit:
    """Costs of one kind of worker's iterations. `ratios`: measured by expected, one worker after the other."""

    costs: LinearIterationModel
    error: FitError  # on the iterations that were fitted
    ratios: tuple[Ratio, ...]


@dataclass(frozen=True, slots=True)
class MachineFit:
    """Costs for a simulation of the recorded machine."""

    decode: WorkerFit
    prefill: WorkerFit | None  # None: colocated workers
    links: SimLinks
    slowdown: float  # of an iteration by each other busy worker, as a share of its time alone
    measured: Mapping[str, tuple[Sample, ...]]  # by worker: what it measured before it served
    unmeasured: LinearIterationModel  # the part of an iteration that engines do not measure


def fit_machine(run: ObservedRun, block_bytes: int) -> MachineFit:
    """Fit the costs of a run that was observed completely. Raises RecordingError if it has too few iterations."""
    workers = [_iterations_of(run.iterations, prefix) for prefix in _PREFIXES]
    if len(workers[0].iterations) < _MIN_SAMPLES or 0 < len(workers[1].iterations) < _MIN_SAMPLES:
        raise RecordingError(f"{sum(len(one.iterations) for one in workers)} iterations are too few to fit costs to")
    links = SimLinks(
        host=_fit_link([copy for copy in run.copies if copy.has_pool_end], block_bytes),
        device=_fit_link([copy for copy in run.copies if not copy.has_pool_end], block_bytes),
        message_s=_median_s(run.message_times_s()),
        submit_s=_median_s(run.submit_times_s()),
        token_s=0.0,  # recorded times of tokens are those of their workers
        submit_times_s=tuple(max(time_s, 0.0) for time_s in run.submit_times_s()),
    )
    slowdown = min(_SLOWDOWNS, key=lambda slowdown: _misfit(workers, slowdown)) if _are_several(run) else 0.0
    decode, prefill = (_fit_worker(one.alone(slowdown)) if one.iterations else None for one in workers)
    assert decode is not None, "checked above"
    return MachineFit(decode, prefill, links, slowdown, run.measured, fit_unmeasured(run.iterations))


def fit_mean(samples: Sequence[Sample]) -> LinearIterationModel:
    """Fit the expected time of an iteration, with errors weighted by the expected time, not the measured one.

    Weighted by the measured time (fit_linear, the starting point), iterations that the machine delayed count for less
    than others, and the sum of all comes out too small.
    """
    first = fit_linear(samples)
    bend_tokens = first.coefficients.bend_tokens
    rows = feature_rows(samples, bend_tokens)
    seconds = np.array([sample.seconds for sample in samples])
    expected: npt.NDArray[np.float64] = np.array([first.iteration_s(sample.work) for sample in samples])
    weights = np.zeros(rows.shape[1])
    for _ in range(_NUM_REWEIGHTINGS):
        weights = nonnegative_least_squares(rows / expected[:, None], seconds / expected)
        expected = rows @ weights
    return LinearIterationModel(LinearCoefficients.of(weights.tolist(), bend_tokens))


def fit_unmeasured(iterations: Sequence[ObservedIteration]) -> LinearIterationModel:
    """Fit what an iteration takes beside its engine's time: deciding, threads, records; some for each request."""
    rows = np.array([(1.0, one.work.num_decodes) for one in iterations]).reshape(-1, 2)
    seconds = np.array([max(one.ended_s - one.started_s - one.engine_s, 0.0) for one in iterations])
    base_s, request_s = nonnegative_least_squares(rows, seconds).tolist()
    return LinearIterationModel(LinearCoefficients(base_s=base_s, decode_s=request_s))


@dataclass(frozen=True, slots=True)
class _WorkerIterations:
    """Iterations of one kind of worker, with the share of each in which other workers were busy."""

    iterations: tuple[ObservedIteration, ...]
    num_others: int
    shares: npt.NDArray[np.float64]

    def alone(self, slowdown: float) -> list[Sample]:
        """Return the samples with their times alone under this slowdown, as if either all others were busy or none."""
        factors = 1.0 - self.shares + self.shares / (1.0 + slowdown * self.num_others)
        seconds = [one.ended_s - one.started_s for one in self.iterations]
        return [
            Sample(one.work, factor * taken_s)
            for one, factor, taken_s in zip(self.iterations, factors.tolist(), seconds, strict=True)
        ]


def _iterations_of(iterations: Sequence[ObservedIteration], prefix: str) -> _WorkerIterations:
    by_worker: dict[str, list[ObservedIteration]] = {}
    for one in iterations:
        if one.ended_s > one.started_s:
            by_worker.setdefault(one.worker, []).append(one)
    chosen = tuple(one for name, ones in by_worker.items() if name.startswith(prefix) for one in ones)
    shares = np.zeros(len(chosen))
    spans = np.array([(one.started_s, one.ended_s) for one in chosen]).reshape(-1, 2)
    for name, ones in by_worker.items():
        edges = np.array([(one.started_s, one.ended_s) for one in ones])
        busy_s = np.repeat(np.cumsum(edges[:, 1] - edges[:, 0]), 2)
        busy_s[::2] -= edges[:, 1] - edges[:, 0]
        shared_s = np.diff(np.interp(spans.ravel(), edges.ravel(), busy_s).reshape(-1, 2))[:, 0]
        shares += np.where([one.worker == name for one in chosen], 0.0, shared_s)
    num_others = max(len(by_worker) - 1, 1)
    return _WorkerIterations(chosen, num_others, shares / (num_others * (spans[:, 1] - spans[:, 0])))


def _are_several(run: ObservedRun) -> bool:
    return len({one.worker for one in run.iterations}) > 1


def _misfit(workers: Sequence[_WorkerIterations], slowdown: float) -> float:
    """Return the mean absolute logarithm of measured by expected times."""
    sizes = [
        abs(math.log(ratio.value))
        for one in workers
        if one.iterations
        for ratio in _fit_worker(one.alone(slowdown)).ratios
    ]
    return statistics.fmean(sizes)


def _fit_worker(samples: Sequence[Sample]) -> WorkerFit:
    costs = fit_mean(samples)
    ratios = tuple(
        Ratio(sample.seconds / costs.iteration_s(sample.work), sample.work.num_chunks > 0) for sample in samples
    )
    return WorkerFit(costs, fit_error(costs, samples), ratios)


def _median_s(times: Sequence[float]) -> float:
    return max(statistics.median(times), 0.0) if times else 0.0


def _fit_link(copies: Sequence[ObservedCopy], block_bytes: int) -> LinkModel:
    """Fit a link by least squares of relative errors, neither part negative; an unused link is free."""
    samples = [(copy.num_blocks * block_bytes, copy.seconds) for copy in copies if copy.num_blocks and copy.seconds > 0]
    if not samples:
        return LinkModel(0.0, _FASTEST)
    sizes, seconds = np.array(samples, np.float64).T
    rows = np.stack([1.0 / seconds, sizes / seconds], axis=1)
    latency_s, byte_s = nonnegative_least_squares(rows, np.ones(len(seconds))).tolist()
    return LinkModel(latency_s, 1.0 / byte_s if byte_s > 1.0 / _FASTEST else _FASTEST)
