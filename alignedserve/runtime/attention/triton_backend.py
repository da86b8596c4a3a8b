"""Attention by the Triton kernels, which read blocks in place; work is partitioned evenly over the batch.

A step's plan is a few integers per sequence, computed on the host. The arrays for a number of decodes have the same
sizes whatever their contexts, except for the block tables, which come last (`DecodeGraphs` replays with new ones)."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.backend import Contexts
from alignedserve.runtime.attention.libraries import (
    AttentionLibrary,
    ChunkComputer,
    ContextChunks,
    LibraryChunks,
    LibraryPrompts,
    OnFailure,
    PromptChoice,
    PromptSetup,
    best_libraries,
    choose_prompts,
    installed_libraries,
    is_worth_gathering,
)
from alignedserve.runtime.attention.ring_tables import RingTables
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence, Runs, SequenceTable, ends_of
from alignedserve.runtime.device.arrays import Array, to_device
from alignedserve.runtime.kv.block_storage import BlockStorage, CachedLayers
from kernels.attention import PLAIN_SCORES, ScoreForm
from kernels.gpu.attention.block_entries import BlockArrays, TableArrays, block_arrays
from kernels.gpu.attention.decode_attention import DecodeBatch, decode_batch, decode_tiling, paged_decode
from kernels.gpu.attention.latent_attention import LatentTiling, latent_decode, latent_prefill, latent_tiling
from kernels.gpu.attention.prefill_attention import ChunkBatch, chunk_tiles, paged_prefill, tiling
from kernels.gpu.attention.work_partition import WorkPartition, first_read, partition
from kernels.gpu.blocks import BlockTables, BlockView
from kernels.gpu.launching import CompiledKernel, multiprocessor_of, parts_of, program_shared_bytes, programs_at_once
from kernels.gpu_dispatch import can_launch, on_device

logger = logging.getLogger(__name__)

_PROGRAMS_OF_INTERPRETER = 4
_LONGEST_REASON = 300
# For larger heads, tiles of keys and values do not fit a multiprocessor's shared memory.
_MAX_HEAD_DIM = 512
NUM_TABLES = len(BlockArrays._fields)  # the last arrays of a step that decodes


class GpuStep:
    """A StepAttention that reads blocks on the device. Layers can be computed once its arrays are bound."""

    padded_share = 0.0

    def __init__(self, rows: IntArray, decodes: "Decodes | None", chunks: ChunkComputer | None) -> None:
        self.decode_rows = rows
        self.decodes = decodes
        self.prompts = chunks
        self._parts: list[ChunkComputer | Decodes] = [part for part in (chunks, decodes) if part is not None]
        self.host_arrays = [array for part in self._parts for array in part.host_arrays]

    def bind(self, tensors: Sequence[Tensor]) -> None:
        first = 0
        for part in self._parts:
            last = first + len(part.host_arrays)
            part.bind(tensors[first:last])
            first = last

    def set_last_blocks(self, blocks: IntArray) -> None:
        assert self.decodes is not None, "nothing decodes in this step"
        self.decodes.set_last_blocks(blocks)

    def decode(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        if self.decodes is not None:
            rows = slice(None, self.decodes.num_rows)
            self.decodes.run(queries[rows], out[rows], layer, is_windowed)

    def chunks(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        if self.prompts is not None:
            rows = slice(0 if self.decodes is None else self.decodes.num_rows, None)
            self.prompts.run(queries[rows], (new[0][rows], new[1][rows]), out[rows], layer, is_windowed)


class ChunkRows(NamedTuple):
    """The query rows of a program that computes chunks."""

    heads: int  # of a token
    query_rows: int  # tokens x heads, at most


class Decodes:
    """One token of each sequence, and padding behind them."""

    def __init__(self, planner: "GpuPlanner", rows: IntArray, num_padding: int) -> None:
        lengths = planner.table.num_computed[rows] + 1
        if num_padding:
            lengths = np.concatenate((lengths, np.ones(num_padding, np.int64)))
        partitions = [
            partition(
                lengths,
                tile=planner.tile,
                num_programs=planner.num_programs,
                window=window,
                is_chunked=planner.is_chunked,
            )
            for window in planner.windows
        ]
        arrays = [array for part in partitions for array in part]
        self.num_rows = len(lengths)
        self.host_arrays: list[Array] = [*arrays, *planner.decoded_arrays(rows, lengths)]
        self._planner = planner
        self._num_own = len(rows)
        self._batches: list[dict[int | None, DecodeBatch]] = []  # of each table, by windows

    def set_last_blocks(self, blocks: IntArray) -> None:
        lengths, starts, _, entries = self.host_arrays[-4:]
        last_columns = (lengths[: self._num_own] - 1) // self._planner.table.block_size
        entries[starts[: self._num_own] + last_columns] = blocks

    def bind(self, tensors: Sequence[Tensor]) -> None:
        *arrays, lengths, starts, is_reversed, entries = tensors
        planner, width = self._planner, len(WorkPartition._fields)
        partitions = [arrays[first : first + width] for first in range(0, len(arrays), width)]
        kv_heads, group, head_dim = planner.heads
        heads = (kv_heads, group, planner.latent_rank or head_dim)
        first, *others = planner.tables(entries, starts, is_reversed)
        batches = {
            window: decode_batch(first, lengths, part, heads)
            for window, part in zip(planner.windows, partitions, strict=True)
        }
        more = ({window: batch._replace(tables=other) for window, batch in batches.items()} for other in others)
        self._batches = [batches, *more]

    def run(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> CompiledKernel | None:
        planner = self._planner
        window = planner.window if is_windowed else None
        table, index = planner.place_of(layer)
        view, batch = BlockView(planner.storage.blocks, index), self._batches[table][window]
        if planner.latent_rank is not None:
            return latent_decode(queries, out, view, batch, rank=planner.latent_rank)
        scores = planner.scores.of_layer(layer)
        return paged_decode(queries, out, view, batch, window=window, is_chunked=planner.is_chunked, scores=scores)


class PagedChunks:
    """Several tokens of each sequence, over contexts in blocks."""

    def __init__(self, planner: "GpuPlanner", rows: IntArray, counts: IntArray, ends: IntArray | None) -> None:
        lengths = planner.table.num_computed[rows] + counts
        of_program = planner.chunk_rows()
        tiles = chunk_tiles(lengths, counts, group=of_program.heads, query_rows=of_program.query_rows)
        later = () if ends is None else (ends.astype(np.int32),)
        self.host_arrays: list[Array] = [*tiles, *later, *planner.block_arrays(rows, lengths)[1:]]
        self._has_ends = ends is not None
        self._planner = planner
        self._batches: list[ChunkBatch] = []  # of each table

    def bind(self, tensors: Sequence[Tensor]) -> None:
        *tiles, starts, is_reversed, entries = tensors
        ends = tiles.pop() if self._has_ends else None
        tables = self._planner.tables(entries, starts, is_reversed)
        self._batches = [ChunkBatch(table, tiles, ends) for table in tables]

    def run(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        assert self._batches, "a layer is computed before its arrays are bound"
        planner = self._planner
        window = planner.window if is_windowed else None
        table, index = planner.place_of(layer)
        view, batch = BlockView(planner.storage.blocks, index), self._batches[table]
        if planner.latent_rank is not None:
            latent_prefill(queries, out, view, batch, rank=planner.latent_rank)
            return
        scores = planner.scores.of_layer(layer)
        if window is None and planner.whole_in_windows:
            batch = batch._replace(ends=None)
        paged_prefill(queries, out, view, batch, window=window, is_chunked=planner.is_chunked, scores=scores)


class GpuPlanner:
    """An AttentionPlanner of the Triton kernels."""

    reads_unused_slots = False
    plans_ahead = True

    def __init__(
        self,
        table: Contexts,
        storage: CachedLayers,
        window: int | None,
        group: int,
        *,
        scratch_block: int | None = None,
        scores: ScoreForm = PLAIN_SCORES,
        is_chunked: bool = False,
        latent_rank: int | None = None,
        whole_runs: Mapping[int, Runs] | None = None,
        whole_in_windows: bool = False,
        num_programs: int | None = None,
    ) -> None:
        """`scratch_block`: which padding reads, of the storage that these layers are a part of; None: its own.
        `is_chunked`, `whole_runs`, `whole_in_windows`: see PagedPlanner.
        `latent_rank`: of a model whose rows are keys and values; None: another.
        `num_programs`: of one decode; None: as many as the GPU runs at once."""
        assert latent_rank is None or (window is None and scores.is_plain), "latents with windows, sinks or a cap"
        self.table = table
        self.storage = storage
        self.window = window
        self.windows: Sequence[int | None] = (None,) if window is None else (None, window)  # of its layers
        self.is_chunked = is_chunked
        self.scores = scores
        self.latent_rank = latent_rank
        self.whole_in_windows = whole_in_windows
        self._whole_runs = whole_runs if whole_runs is not None else {}
        self._arrays = TableArrays(
            table.block_tables,
            table.is_reversed,
            table.block_size,
            _scratch_block(storage) if scratch_block is None else scratch_block,
        )
        self.heads = (storage.layout.num_kv_heads, group, storage.layout.head_dim)
        at_once = num_programs or _programs(storage, group, latent_rank)
        self.num_programs = max(1, at_once // self._side_by_side())
        self._whole: AttentionLibrary | None = None
        self._paged: AttentionLibrary | None = None
        self._clears_tails = False
        self.on_failure: OnFailure = self._drop  # of a library

    def use_library(
        self, library: AttentionLibrary, *, for_whole: bool, for_paged: bool, clears_tails: bool = False
    ) -> None:
        """Compute prompts from their start, or chunks over blocks, by this library from now on.

        `clears_tails`: the slots behind a context are zeroed before the library reads its last block."""
        self._whole = library if for_whole else self._whole
        if for_paged:
            self._paged, self._clears_tails = library, clears_tails

    def _side_by_side(self) -> int:
        kv_heads, group, _ = self.heads
        if self.latent_rank is None:
            return kv_heads
        return parts_of(group, self.latents.heads(group))

    @property
    def latents(self) -> LatentTiling:
        return latent_tiling(self.storage.blocks.dtype, self.storage.device)

    @property
    def tile(self) -> int:
        if self.latent_rank is not None:
            return self.latents.tokens
        blocks = self.storage.blocks
        return decode_tiling(self.heads[2], blocks.dtype, program_shared_bytes(blocks.device)).keys

    def _drop(self, library: AttentionLibrary, error: Exception) -> None:
        if library in (self._whole, self._paged):
            reason = f"{type(error).__name__}: {error}"
            logger.warning("%s failed, our own kernel goes on in its place: %s", library.name, reason[:_LONGEST_REASON])
        self._whole = None if self._whole == library else self._whole
        self._paged = None if self._paged == library else self._paged

    def plan(
        self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray, num_padding: int = 0
    ) -> GpuStep:
        decodes = Decodes(self, decode_rows, num_padding) if len(decode_rows) + num_padding else None
        return GpuStep(decode_rows, decodes, self._chunks(chunk_rows, chunk_counts) if len(chunk_rows) else None)

    def _chunks(self, rows: IntArray, counts: IntArray) -> ChunkComputer:
        ends = ends_of(self._whole_runs, rows, self.table.num_computed[rows], counts)
        paged_chunks = PagedChunks(self, rows, counts, ends)
        if ends is not None:
            return paged_chunks
        if self._whole is not None and not self.table.num_computed[rows].any():
            return LibraryPrompts(self._whole, counts, self.window, paged_chunks, self.on_failure)
        if self._paged is None or not self._may_read(rows):
            return paged_chunks
        chunks = ContextChunks(self.table, rows, counts)
        if self._paged.gathers and not is_worth_gathering(chunks, self._layer_token_bytes):
            return paged_chunks
        assert isinstance(self.storage, BlockStorage), "a library for some of the layers"
        return LibraryChunks(
            self._paged,
            self.storage,
            chunks,
            self.window,
            paged_chunks,
            self.on_failure,
            clears_tails=self._clears_tails,
        )

    def _may_read(self, rows: IntArray) -> bool:
        """Return whether a library may read the contexts of these rows: their slots go forwards. Where it needs numbers
        behind them, all must: what is zeroed there may be the other's where two sequences share a block from its two
        ends."""
        is_reversed = self.table.is_reversed
        return not (is_reversed if self._clears_tails else is_reversed[rows]).any()

    @property
    def _layer_token_bytes(self) -> int:
        layout = self.storage.layout
        return layout.token_bytes // layout.num_layers

    def chunk_rows(self) -> ChunkRows:
        _, group, head_dim = self.heads
        if self.latent_rank is not None:
            return ChunkRows(self.latents.heads(group), self.latents.query_rows)
        blocks = self.storage.blocks
        return ChunkRows(group, tiling(head_dim, blocks.dtype, program_shared_bytes(blocks.device)).query_rows)

    def decoded_arrays(self, rows: IntArray, lengths: IntArray) -> BlockArrays:
        """Return the arrays of contexts of sequences that decode; lengths beyond `rows` are padding."""
        return block_arrays(self._arrays, rows, lengths)

    def block_arrays(self, rows: IntArray, lengths: IntArray) -> BlockArrays:
        return block_arrays(self._arrays, rows, lengths)

    def tables(self, entries: Tensor, starts: Tensor, is_reversed: Tensor) -> Sequence[BlockTables]:
        return [BlockTables(entries, starts, is_reversed)]

    def place_of(self, layer: int) -> tuple[int, int]:
        return 0, layer


def gpu_attention_works(layout: BlockLayout, group: int, device: torch.device, latent_rank: int | None = None) -> bool:
    """Return whether the kernels run here for these heads, by a trial on two short sequences; log once if not."""
    name = f"attention ({layout.dtype}, {group} query heads of {layout.head_dim} per key head)"
    if latent_rank is not None:
        name = f"attention ({layout.dtype}, {group} query heads over latents of {latent_rank})"
    return can_launch(name, lambda: _trial_launch(layout, group, device, latent_rank))


def choose_prompt_attention(planner: GpuPlanner, rings: GpuPlanner | None = None) -> PromptChoice:
    """Have the planner use the libraries that the GPU's generation and their checks allow.

    `rings`: the planner of layers that have some, whose chunks no library reads."""
    storage, window = planner.storage, planner.window if rings is None else rings.window
    assert isinstance(storage, BlockStorage), "a library for some of the layers"
    choice = prompt_choice(storage.layout, storage.num_blocks, planner.heads[1], window, storage.device)
    for library in installed_libraries(storage.layout, storage.device):
        is_whole, is_paged = library.name == choice.whole, library.name == choice.paged
        planner.use_library(library, for_whole=is_whole, for_paged=is_paged, clears_tails=choice.clears_tails)
        if rings is not None:
            rings.use_library(library, for_whole=is_whole, for_paged=False)
    return choice


def prompt_choice(
    layout: BlockLayout, num_blocks: int, group: int, window: int | None, device: torch.device
) -> PromptChoice:
    installed = {library.name for library in installed_libraries(layout, device)}
    if not installed:
        return PromptChoice()
    names = [name for name in best_libraries(device) if name in installed]
    return choose_prompts(PromptSetup(str(device), layout, num_blocks, group, window), names)


class _OneStep:
    def __init__(self, layout: BlockLayout, group: int, device: torch.device, latent_rank: int | None) -> None:
        prompt_len = 2
        width = blocks_for(prompt_len, layout.block_size)
        storage = BlockStorage(replace(layout, num_layers=1), width + 1, device)
        table = SequenceTable(max_sequences=2, max_context_len=prompt_len, block_size=layout.block_size)
        blocks = [BlockId(block) for block in range(width + 1)]
        once = SamplingParams(max_tokens=1)
        decoding = NewSequence(RequestId("decode"), (0, 0), 1, 1, tuple(blocks[:1]), once)
        prompt = NewSequence(RequestId("prompt"), (0,) * prompt_len, prompt_len, 0, tuple(blocks[1:]), once)
        rows = np.array([table.add(decoding), table.add(prompt)])
        planner = GpuPlanner(table, storage, None, group, latent_rank=latent_rank, num_programs=1)
        self._step = planner.plan(rows[:1], rows[1:], np.array([prompt_len]))
        self._step.bind(to_device(self._step.host_arrays, device))
        shape = (1 + prompt_len, *planner.heads)
        dtype = torch.bfloat16 if layout.has_scales else storage.blocks.dtype
        self.queries = torch.zeros(shape, dtype=dtype, device=device)

    def compute(self) -> None:
        out = torch.empty_like(self.queries)
        self._step.decode(self.queries, out, 0, False)
        self._step.chunks(self.queries, (out, out), out, 0, False)

    def decode_kernel(self) -> CompiledKernel | None:
        decodes = self._step.decodes
        assert decodes is not None, "a step without decodes"
        return decodes.run(self.queries[:1], torch.empty_like(self.queries[:1]), 0, False)


def _trial_launch(layout: BlockLayout, group: int, device: torch.device, latent_rank: int | None) -> None:
    if latent_rank is None and layout.head_dim > _MAX_HEAD_DIM:
        raise ValueError(f"no kernel for heads of {layout.head_dim} elements, only up to {_MAX_HEAD_DIM}")
    with on_device(device):
        _OneStep(layout, group, device, latent_rank).compute()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _scratch_block(storage: CachedLayers) -> int:
    return storage.scratch_block if isinstance(storage, BlockStorage) and storage.has_scratch else -1


def _programs(storage: CachedLayers, group: int, latent_rank: int | None) -> int:
    if storage.device.type != "cuda":
        return _PROGRAMS_OF_INTERPRETER
    with on_device(storage.device):
        kernel = _OneStep(storage.layout, group, storage.device, latent_rank).decode_kernel()
    side_by_side = 1 if kernel is None else programs_at_once(kernel, multiprocessor_of(storage.device))
    return int(torch.cuda.get_device_properties(storage.device).multi_processor_count) * side_by_side


# Entries, of four bytes: arrays of blocks begin at addresses of 16, for which kernels are compiled.
_ALIGNMENT = 4


class GpuRingPlanner(GpuPlanner):
    """A GpuPlanner of the layers whose keys and values are in rings: see `ring_tables`. All rings of a step are alike
    but for their blocks: its work is partitioned once. Contexts of sequences that decode are cut to the blocks that
    their windows touch, and so their arrays have the same sizes whatever the contexts."""

    def __init__(
        self,
        table: Contexts,
        rings: RingTables,
        storage: BlockStorage,
        window: int,
        group: int,
        *,
        scores: ScoreForm = PLAIN_SCORES,
        is_chunked: bool = False,
        whole_runs: Mapping[int, Runs] | None = None,
        whole_in_windows: bool = False,
    ) -> None:
        """`scores`: of the rings' layers, those of the first ring first."""
        super().__init__(
            table,
            storage,
            window,
            group,
            scores=scores,
            is_chunked=is_chunked,
            whole_runs=whole_runs,
            whole_in_windows=whole_in_windows,
        )
        self._rings, self._window = rings, window
        touched = blocks_for(window + self.tile, table.block_size) + 1  # by a window, in whole tiles
        self._num_columns = -(-touched // _ALIGNMENT) * _ALIGNMENT
        self.windows = (window,)

    @override
    def place_of(self, layer: int) -> tuple[int, int]:
        return divmod(layer, self.storage.layout.num_layers)

    @override
    def decoded_arrays(self, rows: IntArray, lengths: IntArray) -> BlockArrays:
        num_rows = len(lengths)
        earliest = first_read(lengths, self._window, is_chunked=self.is_chunked)
        first = earliest // self.tile * self.tile // self.table.block_size  # as tiles are read from their start
        columns = first[: len(rows), None] + np.arange(self._num_columns)
        tables = self._rings.tables
        np.minimum(columns, tables.shape[2] - 1, out=columns)
        entries = np.full((len(tables), num_rows, self._num_columns), self._arrays.scratch_block, np.int32)
        entries[:, : len(rows)] = tables[:, rows[:, None], columns]
        starts = np.arange(num_rows) * self._num_columns - first
        flags = np.zeros(num_rows, np.int8)
        return BlockArrays(lengths.astype(np.int32), starts.astype(np.int32), flags, entries.reshape(-1))

    @override
    def block_arrays(self, rows: IntArray, lengths: IntArray) -> BlockArrays:
        of_rings = [
            block_arrays(self._arrays._replace(block_tables=table), rows, lengths) for table in self._rings.tables
        ]
        padding = (0, -len(of_rings[0].entries) % _ALIGNMENT)
        return of_rings[0]._replace(entries=np.concatenate([np.pad(of_ring.entries, padding) for of_ring in of_rings]))

    @override
    def tables(self, entries: Tensor, starts: Tensor, is_reversed: Tensor) -> Sequence[BlockTables]:
        of_rings = entries.view(len(self._rings.tables), -1)
        return [BlockTables(of_ring, starts, is_reversed) for of_ring in of_rings]
