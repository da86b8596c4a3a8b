"""Single iterations of the engine on one device, against what its memory, its arithmetic and its link allow.

An iteration ends with its tokens on the host, so the clock says how long it took, whatever computes it.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.iteration_points import Chunk, Point
from alignedserve.runtime.attention.backend import AUTO
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.streams import streams_of
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from benchmarks.engine.throughput import weight_bytes
from benchmarks.measuring.device_ceilings import TOY_SIZES, measure_device_ceilings
from benchmarks.measuring.device_timing import DeviceTimer
from benchmarks.measuring.pinned_copies import OFFLOAD, PREFETCH, BackgroundCopies, PinnedLists, lists_at_the_end
from benchmarks.measuring.results import DeviceCeilings, IterationReport, IterationRow
from benchmarks.measuring.timed_engine import BLOCK_SIZE, SPARE, TimedEngine
from lab.profiling.model_loading import load_decoder

DECODE, PREFILL, BESIDE_COPIES = "decode", "prefill", "decode beside copies"
BESIDE_LISTED = "decode beside listed copies"  # by the driver's call for lists, in place of gathering
# Targets.
_DECODE_RATIO, _PREFILL_SHARE, _SLOWED_RATIO, _COPY_SHARE = 1.25, 0.65, 1.05, 0.9


@dataclass(frozen=True, slots=True)
class IterationSpec:
    """Parameters of the benchmark. Raises ConfigError naming the field."""

    model: str  # a name in SHAPES (random weights) or a model folder
    dtype: str = "bfloat16"
    device: str = "cpu"
    attention: str = AUTO  # one of CHOICES of runtime.attention
    num_decodes: int = 64
    context_len: int = 2048
    prompt_len: int = 4096
    copied_bytes: int = 512 << 20  # of one list of blocks, each way
    num_ahead: int = 2  # such lists that wait in each direction
    num_rounds: int = 9
    is_toy: bool = False  # shows only whether everything runs
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_decodes", "num_rounds", "num_ahead", "copied_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1.")
        if min(self.context_len, self.prompt_len) < 2:
            raise ConfigError("context_len and prompt_len must be at least 2.")


TOY = IterationSpec(
    model="toy",
    dtype="float32",
    num_decodes=3,
    context_len=24,
    prompt_len=32,
    copied_bytes=1 << 16,
    num_ahead=1,
    num_rounds=1,
    is_toy=True,
)


def run_iteration_benchmark(
    spec: IterationSpec, on_measured: Callable[[IterationReport], None] = lambda _: None
) -> IterationReport:
    """Measure the ceilings, load the model, measure; `on_measured` sees the report after each iteration. Raises
    ConfigError, ModelError or NotEnoughMemory."""
    device = torch.device(spec.device)
    timer = DeviceTimer(device, num_rounds=1, cold_bytes=1 << 16) if spec.is_toy else DeviceTimer(device)
    with torch.inference_mode():
        sizes = TOY_SIZES if spec.is_toy else None
        ceilings = measure_device_ceilings(device, torch_dtype(spec.dtype), timer, sizes)
    del timer
    bench = _IterationBenchmark(spec, load_decoder(spec.model, spec.dtype, spec.device, spec.seed), ceilings)
    report = IterationReport(spec.model, spec.dtype, spec.attention, ceilings, [], [])
    measures = [bench.decode, bench.prefill]
    if device.type == CUDA or spec.is_toy:
        copies = (partial(bench.copy, name) for name in (OFFLOAD, PREFETCH))
        measures += [bench.decode_beside_copies, *copies, partial(bench.decode_beside_copies, is_listed=True)]
    else:
        report.left_out.append("copies beside an iteration, and alone: they are of a GPU")
    for measure in measures:
        report.rows.append(measure())
        on_measured(report)
    return report


class _IterationBenchmark:
    """An engine, and lists of blocks that it does not use."""

    def __init__(self, spec: IterationSpec, decoder: Decoder, ceilings: DeviceCeilings) -> None:
        config = decoder.config
        longest = config.max_position_embeddings - SPARE
        context_len, prompt_len = min(spec.context_len, longest), min(spec.prompt_len, longest)
        self._spec = spec
        self._config = config
        self._ceilings = ceilings
        self._decodes = Point("decode", contexts=(context_len,) * spec.num_decodes)
        self._prompt = Point("prefill", chunks=(Chunk(prompt_len, 0, True),))
        num_listed = max(1, spec.copied_bytes // config.block_layout(BLOCK_SIZE, spec.dtype).block_bytes)
        self._engine = TimedEngine(
            decoder, [self._decodes, self._prompt], attention=spec.attention, num_more_blocks=2 * num_listed
        )
        self._timer, storage = self._engine.timer, self._engine.storage
        lists = lists_at_the_end(storage, num_listed)
        make = partial(PinnedLists, storage, streams_of(storage.device), *lists)
        self._lists, self._driver_lists = make(), make(is_listed=True)
        self._block_kib = storage.layout.block_bytes / 1024

    def decode(self) -> IterationRow:
        """Return weights once, keys and values of every context."""
        config, spec, contexts = self._config, self._spec, self._decodes.contexts
        num_bytes = weight_bytes(config, spec.model, spec.dtype, spec.device).step_bytes
        num_bytes += sum(contexts) * config.kv_token_bytes(spec.dtype)
        num_operations = 2 * config.num_multiplied * len(contexts) + _attention_operations(config, sum(contexts))
        bound_s = self._ceilings.bound_s(num_bytes, num_operations, is_copy=False)
        bound = _Bound(f"{num_bytes / 1e9:.3g} GB read", bound_s)
        return _at_most(DECODE, _named(self._decodes), self._seconds(self._decodes), bound, _DECODE_RATIO)

    def prefill(self) -> IterationRow:
        config = self._config
        (chunk,) = self._prompt.chunks
        num_pairs = chunk.num_tokens * (chunk.num_tokens + 1) // 2
        head = config.vocab_size * config.embedding_size
        num_operations = 2 * (config.num_multiplied - head) * chunk.num_tokens + 2 * head
        num_operations += _attention_operations(config, num_pairs)
        bound_s = num_operations / self._ceilings.matrix_tflop_per_s / 1e12
        bound = _Bound(f"{num_operations / 1e12:.3g} TFLOP", bound_s)
        return _at_least(PREFILL, f"{chunk.num_tokens} tokens", self._seconds(self._prompt), bound, _PREFILL_SHARE)

    def decode_beside_copies(self, *, is_listed: bool = False) -> IterationRow:
        alone: list[float] = []
        beside: list[float] = []
        lists = self._driver_lists if is_listed else self._lists
        num_copied, took_s = 0, 0.0
        for _ in range(self._spec.num_rounds):
            alone.append(self._timer.measure(self._decodes))
            began_s = time.perf_counter()
            with BackgroundCopies(lists, num_ahead=self._spec.num_ahead) as traffic:
                beside.append(self._timer.measure(self._decodes))
            num_copied, took_s = num_copied + traffic.num_copied, took_s + time.perf_counter() - began_s
        rate = num_copied * lists.num_bytes / took_s / 1e9
        sizes = f"{_named(self._decodes)} ({rate:.0f} GB/s both ways)"
        kind, bound = BESIDE_LISTED if is_listed else BESIDE_COPIES, _Bound("alone", statistics.median(alone))
        return _at_most(kind, sizes, statistics.median(beside), bound, _SLOWED_RATIO)

    def copy(self, name: str) -> IterationRow:
        """Measure copying a list of blocks, against a plain copy of as many bytes."""
        speed = self._lists.measure(name, self._spec.num_rounds)
        rate = self._lists.num_bytes / speed.lists_s / 1e9
        sizes = f"{self._lists.num_bytes / 2**20:.3g} MiB in blocks of {self._block_kib:g} KiB, {rate:.1f} GB/s"
        return _at_least(name, sizes, speed.lists_s, _Bound("a plain copy", speed.plain_s), _COPY_SHARE)

    def _seconds(self, point: Point) -> float:
        return self._engine.seconds(point, self._spec.num_rounds)


def _attention_operations(config: ModelConfig, num_pairs: int) -> int:
    return 4 * num_pairs * config.query_width * config.num_layers


def _named(point: Point) -> str:
    return f"{len(point.contexts)} x {point.contexts[0]}"


class _Bound(NamedTuple):
    what: str
    seconds: float


def _at_most(kind: str, sizes: str, seconds: float, bound: _Bound, limit: float) -> IterationRow:
    ratio = seconds / bound.seconds
    times = (seconds * 1e3, bound.what, bound.seconds * 1e3)
    return IterationRow(kind, f"{kind}, {sizes}", *times, ratio, f"at most {limit}", ratio <= limit)


def _at_least(kind: str, sizes: str, seconds: float, bound: _Bound, limit: float) -> IterationRow:
    share = bound.seconds / seconds
    times = (seconds * 1e3, bound.what, bound.seconds * 1e3)
    return IterationRow(kind, f"{kind}, {sizes}", *times, share, f"at least {limit}", share >= limit)
