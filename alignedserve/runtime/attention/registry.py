"""The choice of attention for one engine: a backend, and a planner for each kind of layers over the same contexts.

Attention by the native CPU kernels, which read blocks in place."""

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from alignedserve.core.block_layout import FP8, BlockLayout
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.attention.backend import (
    AUTO,
    TORCH,
    TRITON,
    AttentionPlanner,
    Contexts,
    StepAttention,
    attention_level,
)
from alignedserve.runtime.attention.libraries import FAR_BYTES
from alignedserve.runtime.attention.ring_tables import RingContexts, RingTables
from alignedserve.runtime.attention.sequence_table import IntArray, Runs, SequenceTable, ends_of, tokens_of
from alignedserve.runtime.attention.torch_backend import GatheredPlanner
from alignedserve.runtime.device.arrays import Array
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.kv.block_storage import BlockStorage, CachedLayers
from alignedserve.runtime.model.decoder.model_config import ModelConfig, read_places
from kernels.attention import PLAIN_SCORES, ScoreForm
from kernels.cpu.paged_attention import Int8Heads, PagedAttention, PagedPlan
from kernels.gpu_dispatch import gpu_kernels_available


class PagedStep:
    """A StepAttention of the native kernels."""

    padded_share = 0.0
    host_arrays: Sequence[Array] = ()

    def __init__(
        self,
        paged: PagedAttention,
        rows: IntArray,
        decodes: PagedPlan | None,
        chunks: PagedPlan | None,
        full_chunks: PagedPlan | None = None,
    ) -> None:
        """`full_chunks`: of layers without a window; None: `chunks` are those of all."""
        self.decode_rows = rows
        self._paged = paged
        self._decodes = decodes
        self._chunks = chunks
        self._full_chunks = chunks if full_chunks is None else full_chunks

    @property
    def decode_plan(self) -> PagedPlan | None:
        """Return the plan of a step that only decodes; None: there are chunks."""
        return self._decodes if self._chunks is None else None

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """See StepAttention: nothing to bind."""

    def set_last_blocks(self, blocks: IntArray) -> None:
        raise AssertionError("this planner does not plan ahead")

    def decode(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        if self._decodes is not None:
            count = len(self.decode_rows)
            self._paged.run(self._decodes, queries[:count], out[:count], layer, is_windowed)

    def chunks(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        plan = self._chunks if is_windowed else self._full_chunks
        if plan is not None:
            first = len(self.decode_rows)
            self._paged.run(plan, queries[first:], out[first:], layer, is_windowed)


class PagedPlanner:
    """An AttentionPlanner that plans every step from scratch: a few integers per sequence."""

    reads_unused_slots = False
    plans_ahead = False

    def __init__(
        self,
        table: Contexts,
        window: int | None,
        paged: PagedAttention,
        *,
        is_chunked: bool = False,
        whole_runs: Mapping[int, Runs] | None = None,
        whole_in_windows: bool = False,
    ) -> None:
        """`is_chunked`: contexts are cut at multiples of the window, and a token reads the part that it is in.
        `whole_runs`: of rows of the table; None: no tokens read later ones.
        `whole_in_windows`: they read them in layers with a window alone."""
        self._table = table
        self._whole_runs = whole_runs if whole_runs is not None else {}
        self._whole_in_windows = whole_in_windows
        self._window, self._is_chunked = window, is_chunked
        self._paged = paged
        self._keeps_tables = False

    def keep_tables(self) -> None:
        self._keeps_tables = True

    def plan_runs(self, rows: IntArray, counts: IntArray) -> PagedStep:
        """A token reads those before it: all keys and values of a layer are written first."""
        table = self._table
        token_rows, positions = tokens_of(rows, table.num_computed[rows], counts)
        args = (table.block_tables, token_rows, positions + 1, self._window, torch.get_num_threads())
        directions = table.is_reversed[token_rows]
        decodes = self._paged.plan_decode(*args, is_reversed=directions, is_chunked=self._is_chunked)
        return PagedStep(self._paged, token_rows, decodes, None)

    def plan(
        self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray, num_padding: int = 0
    ) -> PagedStep:
        assert not num_padding, "only the GPU kernels read padding"
        table, num_threads = self._table, torch.get_num_threads()
        decodes = chunks = full_chunks = None
        if len(decode_rows):
            lengths = table.num_computed[decode_rows] + 1
            directions = table.is_reversed[decode_rows]
            tables, rows = table.block_tables, decode_rows
            if self._keeps_tables:
                tables, rows = tables[rows], np.arange(len(rows))
            args = (tables, rows, lengths, self._window, num_threads)
            decodes = self._paged.plan_decode(*args, is_reversed=directions, is_chunked=self._is_chunked)
        if len(chunk_rows):
            lengths = table.num_computed[chunk_rows] + chunk_counts
            directions = table.is_reversed[chunk_rows]
            tables, rows = table.block_tables, chunk_rows
            if self._keeps_tables:
                tables, rows = tables[rows], np.arange(len(rows))
            contexts = (tables, rows, lengths, chunk_counts, self._window, num_threads)
            ends = ends_of(self._whole_runs, chunk_rows, table.num_computed[chunk_rows], chunk_counts)
            chunks = self._paged.plan_chunks(*contexts, is_reversed=directions, is_chunked=self._is_chunked, ends=ends)
            if ends is not None and self._whole_in_windows:
                full_chunks = self._paged.plan_chunks(*contexts, is_reversed=directions, is_chunked=self._is_chunked)
        return PagedStep(self._paged, decode_rows, decodes, chunks, full_chunks)


class StepOfKinds:
    """A StepAttention over layers of several kinds."""

    host_arrays: Sequence[Array] = ()

    def __init__(self, steps: Sequence[StepAttention], places: Sequence[tuple[int, int]]) -> None:
        """`places`: the kind of each cached layer, and its place among those."""
        self.steps, self._places = steps, places
        self.decode_rows = steps[0].decode_rows
        self.padded_share = max(step.padded_share for step in steps)
        assert all(np.array_equal(step.decode_rows, self.decode_rows) for step in steps), "rows in several orders"

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """See StepAttention: nothing to bind."""

    def set_last_blocks(self, blocks: IntArray) -> None:
        raise AssertionError("these planners do not plan ahead")

    def decode(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        kind, index = self._places[layer]
        self.steps[kind].decode(queries, out, index, is_windowed)

    def chunks(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        kind, index = self._places[layer]
        self.steps[kind].chunks(queries, new, out, index, is_windowed)


class DeviceStepOfKinds(StepOfKinds):
    """The same on a GPU, with all arrays of the steps, the block tables of the first behind all else."""

    def __init__(
        self, steps: Sequence[StepAttention], places: Sequence[tuple[int, int]], num_tables: int, *, share_tables: bool
    ) -> None:
        """`num_tables`: of the arrays of each step, the last. `share_tables`: those of the others are the same."""
        super().__init__(steps, places)
        counts = [len(step.host_arrays) for step in steps]
        with_tables = len(steps) if share_tables else 1
        self._num_own = [count - num_tables for count in counts[:with_tables]] + counts[with_tables:]
        self._shares_tables = share_tables
        arrays = [array for step, count in zip(steps, self._num_own, strict=True) for array in step.host_arrays[:count]]
        self.host_arrays = [*arrays, *steps[0].host_arrays[self._num_own[0] :]]

    @override
    def bind(self, tensors: Sequence[Tensor]) -> None:
        tables, first = tensors[sum(self._num_own) :], 0
        for index, (step, count) in enumerate(zip(self.steps, self._num_own, strict=True)):
            has_tables = self._shares_tables or not index
            step.bind([*tensors[first : first + count], *(tables if has_tables else ())])
            first += count

    @override
    def set_last_blocks(self, blocks: IntArray) -> None:
        self.steps[0].set_last_blocks(blocks)


class PlannerOfKinds:
    """An AttentionPlanner over layers of several kinds."""

    def __init__(
        self,
        planners: Sequence[AttentionPlanner],
        num_layers: Sequence[int],
        num_tables: int = 0,
        *,
        share_tables: bool = True,
    ) -> None:
        """`planners`, `num_layers`: of each kind. `num_tables`: of the arrays of a step that decodes, the last, which
        are those of block tables. `share_tables`: all kinds have the same."""
        self.plans_ahead = all(planner.plans_ahead for planner in planners)
        self._num_tables, self._share_tables = num_tables, share_tables
        self._planners = planners
        self._places = [(kind, index) for kind, count in enumerate(num_layers) for index in range(count)]
        self.reads_unused_slots = any(planner.reads_unused_slots for planner in planners)

    def plan(
        self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray, num_padding: int = 0
    ) -> StepOfKinds:
        args = (decode_rows, chunk_rows, chunk_counts, num_padding)
        steps = [planner.plan(*args) for planner in self._planners]
        if not self.plans_ahead:
            return StepOfKinds(steps, self._places)
        num_tables = self._num_tables if len(decode_rows) + num_padding else 0
        return DeviceStepOfKinds(steps, self._places, num_tables, share_tables=self._share_tables)


class PagedPlannerOfKinds(PlannerOfKinds):
    """The same of native kernels, which is a RunPlanner too."""

    def __init__(self, planners: Sequence[PagedPlanner], num_layers: Sequence[int]) -> None:
        super().__init__(planners, num_layers)
        self._paged = planners

    def keep_tables(self) -> None:
        for planner in self._paged:
            planner.keep_tables()

    def plan_runs(self, rows: IntArray, counts: IntArray) -> StepOfKinds:
        return StepOfKinds([planner.plan_runs(rows, counts) for planner in self._paged], self._places)


_SCALE_ALIGNMENT = 4  # bytes
_GROUP = 4  # query heads per key head of the model that doctor describes attention of
logger = logging.getLogger(__name__)


def attention_planner(
    choice: str,
    table: Contexts,
    storage: BlockStorage,
    config: ModelConfig,
    dtype: torch.dtype,
    scores: ScoreForm = PLAIN_SCORES,
    rings: RingTables | None = None,
) -> AttentionPlanner:
    """Return the planner for `choice`; plain PyTorch, with a warning, where the GPU kernels do not run.

    `dtype`: of queries, and of the cache unless it has scales. `scores`: the model's (Decoder.scores). `rings`: where
    layers with a window have keys and values, if not in the blocks of `table`.
    Raises ConfigError for an unavailable choice."""
    if storage.layout.is_int8 and storage.device.type != "cpu":
        raise ConfigError(f"kv_cache_dtype=int8 is computed on CPUs alone, not on {storage.device}; fp8 is as small.")
    if storage.layout.dtype == FP8 and storage.layout.kv_width % _SCALE_ALIGNMENT:
        raise ConfigError("kv_cache_dtype=fp8: the elements of a token's keys are no multiple of 4; leave it at auto.")
    level = attention_level(choice, storage.device, dtype)
    if storage.layout.dtype == FP8 and level not in (TORCH, TRITON):
        raise ConfigError("kv_cache_dtype=fp8 is computed on GPUs, not by the CPU's kernels; int8 is as small here.")
    if level == TRITON:
        on_gpu = _gpu_planner(table, storage, config, scores, rings)
        if on_gpu is not None:
            return on_gpu
    runs = table.whole_runs if isinstance(table, SequenceTable) else None
    parts = _parts(table, storage, config, scores, rings)
    planners = [_cpu_planner(level, *part, config, dtype, runs) for part in parts]
    if len(planners) == 1:
        return planners[0]
    num_layers = [part.layers.layout.num_layers for part in parts]
    paged = [planner for planner in planners if isinstance(planner, PagedPlanner)]
    return PagedPlannerOfKinds(paged, num_layers) if paged else PlannerOfKinds(planners, num_layers)


class _Part(NamedTuple):
    contexts: Contexts
    layers: CachedLayers
    scores: ScoreForm


def _parts(
    table: Contexts, storage: BlockStorage, config: ModelConfig, scores: ScoreForm, rings: RingTables | None
) -> list[_Part]:
    if rings is None:
        assert scores.sinks is None or len(storage.kinds) == 1, "sinks of several kinds of layers"
        return [_Part(table, kind, scores) for kind in (storage.kinds if storage.layout.unlike else (storage,))]
    of_rings = (RingContexts(rings, ring, table) for ring in range(storage.layout.num_rings))
    sinks = _sinks_of_parts(config, storage.layout, scores)
    parts = zip((table, *of_rings), sinks, strict=True)
    return [_Part(contexts, storage, scores._replace(sinks=some)) for contexts, some in parts]


def _sinks_of_parts(config: ModelConfig, layout: BlockLayout, scores: ScoreForm) -> Sequence[Tensor | None]:
    num_parts = 1 + layout.num_rings
    if scores.sinks is None:
        return [None] * num_parts
    places = read_places(config, has_rings=True)
    ordered = scores.sinks[sorted(places, key=places.__getitem__)]
    missing = num_parts * layout.num_layers - len(ordered)
    return torch.split(pad(ordered, (0, 0, 0, missing)), layout.num_layers)


def _cpu_planner(
    level: str,
    table: Contexts,
    layers: CachedLayers,
    scores: ScoreForm,
    config: ModelConfig,
    dtype: torch.dtype,
    runs: Mapping[int, Runs] | None,
) -> PagedPlanner | GatheredPlanner:
    is_chunked, window = config.has_chunked_windows, config.sliding_window
    in_windows = config.extras is not None and config.extras.pictures_in_windows
    if level in (TORCH, TRITON):
        args = (table, layers, window, dtype, scores)
        return GatheredPlanner(*args, is_chunked=is_chunked, whole_runs=runs, whole_in_windows=in_windows)
    kv_heads = layers.layout.num_kv_heads
    int8 = Int8Heads(kv_heads, dtype) if layers.layout.is_int8 else None
    group = config.num_heads // kv_heads
    paged = PagedAttention(layers.blocks, group=group, level=level, int8=int8, scores=scores)
    return PagedPlanner(table, window, paged, is_chunked=is_chunked, whole_runs=runs, whole_in_windows=in_windows)


def check_libraries(
    choice: str, layout: BlockLayout, num_blocks: int, config: ModelConfig, device: torch.device
) -> None:
    """Check the libraries that may compute prompts and chunks over so many blocks, before their memory is allocated.
    `choice` as for attention_planner, which uses the results. Nothing happens where no library may be used."""
    if device.type != CUDA or choice not in (AUTO, TRITON) or not gpu_kernels_available(device):
        return
    gpu_attention = importlib.import_module("alignedserve.runtime.attention.triton_backend")
    if _is_plain(config) and gpu_attention.gpu_attention_works(layout, config.group_size, device):
        gpu_attention.prompt_choice(layout, num_blocks, config.group_size, config.sliding_window, device)


def _is_plain(config: ModelConfig) -> bool:
    has_scores = config.has_sinks or config.score_cap is not None
    return config.latent is None and not has_scores and not config.has_chunked_windows


def _gpu_planner(
    table: Contexts, storage: BlockStorage, config: ModelConfig, scores: ScoreForm, rings: RingTables | None
) -> AttentionPlanner | None:
    gpu_attention = importlib.import_module("alignedserve.runtime.attention.triton_backend")  # loads Triton
    rank = None if config.latent is None else config.latent.rank
    kinds: Sequence[CachedLayers] = storage.kinds if storage.layout.unlike else (storage,)
    groups = [config.num_heads // kind.layout.num_kv_heads for kind in kinds]
    for kind, group in zip(kinds, groups, strict=True):
        if not gpu_attention.gpu_attention_works(kind.layout, group, storage.device, rank):
            return None
    more: dict[str, Any] = {
        "is_chunked": config.has_chunked_windows,
        "whole_runs": table.whole_runs if isinstance(table, SequenceTable) else None,
        "whole_in_windows": config.extras is not None and config.extras.pictures_in_windows,
    }
    if rings is not None:
        return _gpu_planner_of_rings(table, storage, config, scores, rings, more)
    planners = [
        gpu_attention.GpuPlanner(
            table,
            kind,
            config.sliding_window,
            group,
            scratch_block=storage.scratch_block if storage.has_scratch else None,
            scores=scores,
            latent_rank=rank,
            **more,
        )
        for kind, group in zip(kinds, groups, strict=True)
    ]
    if storage.layout.unlike:
        num_layers = [kind.layout.num_layers for kind in storage.kinds]
        return PlannerOfKinds(planners, num_layers, gpu_attention.NUM_TABLES)
    (planner,) = planners
    if _is_plain(config):
        logger.info("attention: %s", gpu_attention.choose_prompt_attention(planner))
    return cast(AttentionPlanner, planner)


def _gpu_planner_of_rings(
    table: Contexts,
    storage: BlockStorage,
    config: ModelConfig,
    scores: ScoreForm,
    rings: RingTables,
    more: Mapping[str, Any],
) -> AttentionPlanner:
    gpu_attention = importlib.import_module("alignedserve.runtime.attention.triton_backend")
    group, layout, window = config.group_size, storage.layout, config.sliding_window
    first, *of_rings = _sinks_of_parts(config, layout, scores)
    all_rings = (
        torch.cat([of_ring for of_ring in of_rings if of_ring is not None]) if scores.sinks is not None else None
    )
    plain = gpu_attention.GpuPlanner(table, storage, None, group, scores=scores._replace(sinks=first), **more)
    rung = gpu_attention.GpuRingPlanner(
        table, rings, storage, window, group, scores=scores._replace(sinks=all_rings), **more
    )
    if _is_plain(config):
        logger.info("attention: %s", gpu_attention.choose_prompt_attention(plain, rung))
    num_layers = [layout.num_layers, layout.num_rings * layout.num_layers]
    return PlannerOfKinds([plain, rung], num_layers, gpu_attention.NUM_TABLES, share_tables=False)


class GpuAttention(NamedTuple):
    """The attention backends of a GPU, described in words."""

    decodes: str
    prompts: str


def describe_gpu_attention(device: torch.device) -> GpuAttention:
    layout = BlockLayout(block_size=16, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    if not gpu_kernels_available(device):
        return GpuAttention("plain PyTorch: Triton is not installed", "plain PyTorch")
    gpu_attention = importlib.import_module("alignedserve.runtime.attention.triton_backend")
    if not gpu_attention.gpu_attention_works(layout, _GROUP, device):
        return GpuAttention("plain PyTorch: the Triton kernels do not run here, see the warning", "plain PyTorch")
    prompts = gpu_attention.prompt_choice(layout, FAR_BYTES // layout.block_bytes, _GROUP, None, device)
    return GpuAttention("Triton, straight from blocks", str(prompts))
