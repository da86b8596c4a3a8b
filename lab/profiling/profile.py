"""Measures what iterations of the engine cost on this machine, and fits a cost model to it.

Every point is an iteration as a worker would perform it, on caches that are there without having been computed. Rounds
go through all points again and again until the time is up, so that a disturbance meets few measurements of each;
medians count.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.iteration_points import Point
from alignedserve.costmodel.linear import FitError, Sample, fit_error, fit_linear, nonnegative_least_squares
from alignedserve.costmodel.model_shapes import ModelShape
from alignedserve.costmodel.straggler import straggler_in
from alignedserve.runtime.device.accelerator import free_bytes
from alignedserve.runtime.device.devices import CUDA, worker_devices
from alignedserve.runtime.device.streams import streams_of
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.measured_iterations import IterationTimer
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.staged_copies import StagedCopies, exact_codec
from lab.costmodel.profile_file import MachineProfile
from lab.profiling.model_loading import load_decoder
from lab.profiling.points import CPU_SIZES, GPU_SIZES, PointSizes, fitted_points, held_out_points

ByteArray = npt.NDArray[np.uint8]

_BLOCK_SIZE = 16
_NUM_HELD_OUT = 24
_COPY_BLOCKS = (1, 4, 16, 64, 256, 1024)
_NUM_COPIES = 9
_CPU_CACHE_BYTES = 1 << 30
# On a GPU: most of what the weights leave, up to what the largest points need of an 8B model, and more contexts.
_GPU_CACHE_SHARE, _MAX_GPU_CACHE_BYTES = 0.8, 40 << 30
_MAX_GPU_CONTEXT = 16_384  # tables are as long
_MAX_GPU_COPY_BYTES = 256 << 20  # page-locked on the host


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """Parameters of the profile. Raises ConfigError naming the field."""

    model: str  # pocket, a name in SHAPES (random weights) or a model folder
    dtype: str = "float32"
    duration_s: float = 90.0  # of measuring; loading comes on top
    num_threads: int | None = None  # torch's own choice when None
    cache_bytes: int | None = None  # None: 1 GiB; on a GPU most of what the weights leave, 40 GiB at most
    device: str = "cpu"  # as engine.device; cuda: the first GPU
    is_cpu_time: bool = False  # of the computing thread, in place of the clock: what others do counts less

    def __post_init__(self) -> None:
        if self.is_cpu_time and self.num_threads != 1:
            raise ConfigError("processor time needs threads to be 1: of several, it would count those that wait.")
        if self.is_cpu_time and self.device.startswith(CUDA):
            raise ConfigError("processor time says nothing of a GPU.")
        if self.duration_s <= 0.0:
            raise ConfigError("duration must be above 0.")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError("threads must be at least 1.")


@dataclass(frozen=True, slots=True)
class PointResult:
    """A point and its times in seconds, one for each measurement."""

    point: Point
    seconds: list[float] = field(default_factory=list)

    @property
    def sample(self) -> Sample:
        return Sample(self.point.work, statistics.median(self.seconds))


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """Measured points, and the model fitted to them."""

    profile: MachineProfile
    fitted: list[PointResult]
    held_out: list[PointResult]
    num_rounds: int
    num_threads: int

    @property
    def errors(self) -> dict[str, FitError]:
        """Return the errors of the fitted model by kind of point; held-out points come last."""
        costs = self.profile.cost_model()
        by_kind: dict[str, list[Sample]] = {}
        for result in (*self.fitted, *self.held_out):
            by_kind.setdefault(result.point.kind, []).append(result.sample)
        return {kind: fit_error(costs, samples) for kind, samples in by_kind.items()}


def run_profile(spec: ProfileSpec, on_measured: Callable[[float], None] = lambda _: None) -> ProfileResult:
    """Load the model, measure, fit. `on_measured` hears the seconds gone. Raises ModelError or ConfigError."""
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    profiler = _Profiler(spec)
    sizes = profiler.sizes
    held_out = [PointResult(point) for point in profiler.feasible(held_out_points(0, _NUM_HELD_OUT, sizes))]
    fitted = [PointResult(point) for point in [*profiler.feasible(fitted_points(sizes)), *profiler.straggler_points()]]
    num_rounds = profiler.measure([*held_out, *fitted], on_measured)
    fitted, held_out = ([result for result in results if result.seconds] for results in (fitted, held_out))
    samples = [result.sample for result in fitted]
    costs = fit_linear(samples, straggler=straggler_in(samples).share)
    num_threads = torch.get_num_threads()
    profile = MachineProfile(profiler.shape, costs.coefficients, profiler.memory_link(), num_threads)
    return ProfileResult(profile, fitted, held_out, num_rounds, num_threads)


def sizes_on(device: torch.device) -> PointSizes:
    return GPU_SIZES if device.type == CUDA else CPU_SIZES


class _Profiler:
    def __init__(self, spec: ProfileSpec) -> None:
        decoder = load_decoder(spec.model, spec.dtype, worker_devices(spec.device, 1)[0])
        config = decoder.config
        layout = config.block_layout(_BLOCK_SIZE, spec.dtype)
        self.shape: ModelShape = config.shape(spec.model, spec.dtype)
        self._duration_s = spec.duration_s
        self._clock = time.thread_time if spec.is_cpu_time else time.perf_counter
        self.sizes = sizes_on(decoder.device)
        self._is_on_gpu = decoder.device.type == CUDA
        cache_bytes = spec.cache_bytes or _cache_bytes(decoder.device)
        self._storage = BlockStorage(layout, max(1, cache_bytes // layout.block_bytes), decoder.device)
        self._storage.bytes.zero_()  # attention reads them before anything was computed
        longest = config.max_position_embeddings
        self._max_context_len = min(longest, _MAX_GPU_CONTEXT) if self._is_on_gpu else longest
        engine = Engine(
            model=decoder,
            storage=self._storage,
            options=EngineOptions(max_sequences=self.sizes.max_requests, max_context_len=self._max_context_len),
        )
        engine.record_graphs()
        # In no order, as the blocks of a worker that has served for a while.
        self._block_ids: list[int] = np.random.default_rng(0).permutation(self._storage.num_blocks).tolist()
        self._timer = IterationTimer(engine, block_ids=self._block_ids, clock=self._clock)

    def feasible(self, points: Sequence[Point]) -> list[Point]:
        return self._timer.feasible(points, self._max_context_len)

    def straggler_points(self) -> list[Point]:
        return self._timer.straggler_points(self.sizes.max_requests, self._max_context_len)

    def measure(self, results: list[PointResult], on_measured: Callable[[float], None]) -> int:
        """Measure the points, those with fewest tokens first, until the time is up. Returns the number of whole rounds.

        Of a model too slow for one round, the points with most tokens have no time.
        """
        results = sorted(results, key=lambda result: (result.point.work.num_tokens, result.point.work.prompt_pairs))
        self._timer.measure(results[-1].point if len(results) < 2 else results[len(results) // 2].point)  # warms up
        for result in results if self._is_on_gpu else ():  # for whose sizes kernels may have to be compiled
            self._timer.measure(result.point, 1)
        started = time.perf_counter()
        num_rounds = 0
        while True:
            for result in results:
                result.seconds.append(self._timer.measure(result.point))
                gone = time.perf_counter() - started
                on_measured(min(gone, self._duration_s))
                if gone > self._duration_s:
                    return num_rounds
            num_rounds += 1

    def memory_link(self) -> LinkModel:
        num_blocks, block_bytes = self._storage.bytes.shape
        most = _MAX_GPU_COPY_BYTES // block_bytes if self._is_on_gpu else num_blocks
        counts = [count for count in _COPY_BLOCKS if count * _NUM_COPIES <= num_blocks and count <= max(most, 1)]
        copy = self._copier(counts[-1])
        rows = []
        for count in counts:
            # Other blocks each time: those just copied would come from the processor's caches.
            lists = [self._block_ids[index * count :][:count] for index in range(_NUM_COPIES)]
            seconds = statistics.median(self._timed(partial(copy, blocks)) for blocks in lists)
            rows.append((1.0 / seconds, count * block_bytes / seconds))
        latency_s, byte_s = nonnegative_least_squares(np.array(rows), np.ones(len(rows))).tolist()
        return LinkModel(latency_s, 1.0 / byte_s)

    def _copier(self, max_blocks: int) -> Callable[[Sequence[int]], object]:
        if self._storage.device.type == "cpu":
            target = np.zeros((max_blocks, self._storage.layout.block_bytes), np.uint8)
            return partial(_copy, self._storage.bytes.numpy(), target)
        stream = streams_of(self._storage.device).stream("offload")
        copies = StagedCopies(exact_codec(self._storage.bytes), stream, self._storage.accelerator)
        rows = copies.pinned(max_blocks)

        def copy(blocks: Sequence[int]) -> None:
            copies.copy_out(np.array(blocks, np.int64), rows[: len(blocks)])
            stream.record().synchronize()

        return copy

    def _timed(self, work: Callable[[], object]) -> float:
        started = self._clock()
        work()
        return self._clock() - started


def _cache_bytes(device: torch.device) -> int:
    if device.type != CUDA:
        return _CPU_CACHE_BYTES
    return min(int(_GPU_CACHE_SHARE * free_bytes(device)), _MAX_GPU_CACHE_BYTES)


def _copy(source: ByteArray, target: ByteArray, blocks: Sequence[int]) -> None:
    for index, block in enumerate(blocks):
        target[index] = source[block]
