"""Attention by the Triton kernels, which read blocks in place; work is partitioned evenly over the batch.

A step's plan is a few integers per sequence, computed on the host. The arrays for a number of decodes have the same
sizes whatever their contexts, except for the block tables, which come last (`DecodeGraphs` replays with new ones).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.backend import Contexts
from alignedserve.runtime.attention.flash_backend import (
    FLASH,
    PROMPT_TOKENS,
    PromptChoice,
    WholePrompts,
    choose_prompts,
    flash_prompts,
)
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence, SequenceTable
from alignedserve.runtime.device.arrays import Array, to_device
from alignedserve.runtime.kv.block_storage import BlockStorage
from kernels.gpu.blocks import BlockTables, BlockView
from kernels.gpu.decode_attention import TILE, DecodeBatch, decode_batch, occupancy, paged_decode
from kernels.gpu.prefill_attention import ChunkBatch, chunk_tiles, paged_prefill, tiling
from kernels.gpu.work_partition import WorkPartition, partition
from kernels.gpu_dispatch import can_launch, on_device

_PROGRAMS_OF_INTERPRETER = 4
# For larger heads, tiles of keys and values do not fit a multiprocessor's shared memory.
_MAX_HEAD_DIM = 256


class GpuStep:
    """A StepAttention that reads blocks on the device. Layers can be computed once its arrays are bound."""

    padded_share = 0.0

    def __init__(
        self, rows: IntArray, decodes: "_Decodes | None", chunks: "_PagedChunks | _PromptChunks | None"
    ) -> None:
        self.decode_rows = rows
        self._decodes = decodes
        self.prompts = chunks
        self._parts = [part for part in (chunks, decodes) if part is not None]
        self.host_arrays = [array for part in self._parts for array in part.host_arrays]

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """See StepAttention."""
        first = 0
        for part in self._parts:
            last = first + len(part.host_arrays)
            part.bind(tensors[first:last])
            first = last

    def set_last_blocks(self, blocks: IntArray) -> None:
        """See StepAttention."""
        assert self._decodes is not None, "nothing decodes in this step"
        self._decodes.set_last_blocks(blocks)

    def decode(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        """See StepAttention."""
        if self._decodes is not None:
            rows = slice(None, self._decodes.num_rows)
            self._decodes.run(queries[rows], out[rows], layer, is_windowed)

    def chunks(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        """See StepAttention."""
        if self.prompts is not None:
            rows = slice(0 if self._decodes is None else self._decodes.num_rows, None)
            self.prompts.run(queries[rows], (new[0][rows], new[1][rows]), out[rows], layer, is_windowed)


class GpuPlanner:
    """An AttentionPlanner of the Triton kernels."""

    reads_unused_slots = False
    plans_ahead = True

    def __init__(self, table: Contexts, storage: BlockStorage, window: int | None, group: int) -> None:
        self.table = table
        self.storage = storage
        self.window = window
        self.heads = (storage.layout.num_kv_heads, group, storage.layout.head_dim)
        self.num_programs = max(1, _programs(storage) // storage.layout.num_kv_heads)
        self._flash: WholePrompts | None = None

    def use_flash(self, flash: WholePrompts) -> None:
        """Compute whole prompts by this kernel from now on."""
        self._flash = flash

    def plan(
        self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray, num_padding: int = 0
    ) -> GpuStep:
        """See AttentionPlanner. Padding reads one slot of the storage's scratch block."""
        decodes = _Decodes(self, decode_rows, num_padding) if len(decode_rows) + num_padding else None
        if not len(chunk_rows):
            return GpuStep(decode_rows, decodes, None)
        if self._flash is not None and not self.table.num_computed[chunk_rows].any():
            return GpuStep(decode_rows, decodes, _PromptChunks(self, self._flash, chunk_counts))
        return GpuStep(decode_rows, decodes, _PagedChunks(self, chunk_rows, chunk_counts))

    def block_tables(self, rows: IntArray, lengths: IntArray) -> list[Array]:
        """Return the arrays of a BlockTables, its entries last; lengths beyond `rows` are padding."""
        widths = -(-lengths // self.table.block_size)
        tables = self.table.block_tables
        own = [tables[row, :width] for row, width in zip(rows.tolist(), widths.tolist(), strict=False)]
        if len(lengths) > len(rows):
            own.append(np.full(len(lengths) - len(rows), self.storage.scratch_block))
        entries = np.concatenate(own).astype(np.int32)
        is_reversed = np.zeros(len(lengths), np.int8)
        is_reversed[: len(rows)] = self.table.is_reversed[rows]
        return [(np.cumsum(widths) - widths).astype(np.int32), is_reversed, entries]


class _Decodes:
    """One token of each sequence, and padding behind them."""

    def __init__(self, planner: GpuPlanner, rows: IntArray, num_padding: int) -> None:
        lengths = np.concatenate((planner.table.num_computed[rows] + 1, np.ones(num_padding, np.int64)))
        windows = (None,) if planner.window is None else (None, planner.window)
        partitions = [
            partition(lengths, tile=TILE, num_programs=planner.num_programs, window=window) for window in windows
        ]
        arrays = [array for part in partitions for array in part]
        self.num_rows = len(lengths)
        self.host_arrays: list[Array] = [*arrays, lengths.astype(np.int32), *planner.block_tables(rows, lengths)]
        self._planner = planner
        self._num_own = len(rows)
        self._batches: list[DecodeBatch] = []

    def set_last_blocks(self, blocks: IntArray) -> None:
        lengths, starts, _, entries = self.host_arrays[-4:]
        last_columns = (lengths[: self._num_own] - 1) // self._planner.table.block_size
        entries[starts[: self._num_own] + last_columns] = blocks

    def bind(self, tensors: Sequence[Tensor]) -> None:
        *arrays, lengths, starts, is_reversed, entries = tensors
        tables = BlockTables(entries, starts, is_reversed)
        width = len(WorkPartition._fields)
        partitions = [arrays[first : first + width] for first in range(0, len(arrays), width)]
        self._batches = [decode_batch(tables, lengths, part, self._planner.heads) for part in partitions]

    def run(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        window = self._planner.window if is_windowed else None
        # The scratch block lies right behind those of the view.
        view = BlockView(self._planner.storage.blocks, layer)
        paged_decode(queries, out, view, self._batches[window is not None], window=window)


class _PagedChunks:
    """Several tokens of each sequence, over contexts in blocks."""

    def __init__(self, planner: GpuPlanner, rows: IntArray, counts: IntArray) -> None:
        lengths = planner.table.num_computed[rows] + counts
        _, group, head_dim = planner.heads
        dtype = planner.storage.blocks.dtype
        tiles = chunk_tiles(lengths, counts, group=group, query_rows=tiling(head_dim, dtype).query_rows)
        self.host_arrays: list[Array] = [*tiles, *planner.block_tables(rows, lengths)]
        self._planner = planner
        self._batch: ChunkBatch | None = None

    def bind(self, tensors: Sequence[Tensor]) -> None:
        *tiles, starts, is_reversed, entries = tensors
        self._batch = ChunkBatch(BlockTables(entries, starts, is_reversed), tiles)

    def run(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        assert self._batch is not None, "a layer is computed before its arrays are bound"
        window = self._planner.window if is_windowed else None
        paged_prefill(queries, out, BlockView(self._planner.storage.blocks, layer), self._batch, window=window)


class _PromptChunks:
    """Prompts from their first token on, which read only the keys and values that the layer has just computed."""

    def __init__(self, planner: GpuPlanner, flash: WholePrompts, counts: IntArray) -> None:
        self.host_arrays: list[Array] = [np.concatenate(([0], np.cumsum(counts))).astype(np.int32)]
        self._planner = planner
        self._flash = flash
        self._longest = int(counts.max())
        self._starts: Tensor | None = None

    def bind(self, tensors: Sequence[Tensor]) -> None:
        (self._starts,) = tensors

    def run(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        assert self._starts is not None, "a layer is computed before its arrays are bound"
        kv_heads, group, head_dim = self._planner.heads
        keys, values = (part.view(len(part), kv_heads, head_dim) for part in new)
        flat = queries.reshape(len(queries), kv_heads * group, head_dim)
        window = self._planner.window if is_windowed else None
        out.copy_(self._flash(flat, keys, values, self._starts, self._longest, window).view(out.shape))


def gpu_attention_works(layout: BlockLayout, group: int, device: torch.device) -> bool:
    """Return whether the kernels run here for these heads, by a trial on two short sequences; log once if not."""
    name = f"attention ({layout.dtype}, {group} query heads of {layout.head_dim} per key head)"
    return can_launch(name, lambda: _trial_launch(layout, group, device))


def choose_prompt_attention(planner: GpuPlanner) -> PromptChoice | None:
    """Have the planner use the faster prompt kernel, flash-attn or ours; None: there is no choice."""
    flash = flash_prompts()
    if flash is None or planner.storage.device.type != "cuda":
        return None
    own = _OneStep(planner.storage.layout, planner.heads[1], planner.storage.device, prompt_len=PROMPT_TOKENS)
    choice = choose_prompts(flash, own.compute_prompt, planner.heads, planner.storage.blocks)
    if choice.chosen == FLASH:
        planner.use_flash(flash)
    return choice


class _OneStep:
    """A step over its own zeroed storage: a token of one sequence and the prompt of another."""

    def __init__(self, layout: BlockLayout, group: int, device: torch.device, *, prompt_len: int) -> None:
        width = blocks_for(prompt_len, layout.block_size)
        storage = BlockStorage(replace(layout, num_layers=1), width + 1, device)
        storage.blocks.zero_()
        table = SequenceTable(max_sequences=2, max_context_len=prompt_len, block_size=layout.block_size)
        blocks = [BlockId(block) for block in range(width + 1)]
        once = SamplingParams(max_tokens=1)
        decoding = NewSequence(RequestId("decode"), (0, 0), 1, 1, tuple(blocks[:1]), once)
        prompt = NewSequence(RequestId("prompt"), (0,) * prompt_len, prompt_len, 0, tuple(blocks[1:]), once)
        rows = np.array([table.add(decoding), table.add(prompt)])
        planner = GpuPlanner(table, storage, None, group)
        self._step = planner.plan(rows[:1], rows[1:], np.array([prompt_len]))
        self._step.bind(to_device(self._step.host_arrays, device))
        shape = (1 + prompt_len, *planner.heads)
        self.queries = torch.zeros(shape, dtype=storage.blocks.dtype, device=device)

    def compute(self) -> None:
        out = torch.empty_like(self.queries)
        self._step.decode(self.queries, out, 0, False)
        self._step.chunks(self.queries, (out, out), out, 0, False)

    def compute_prompt(self, queries: Tensor, out: Tensor) -> None:
        """Compute the prompt alone, from `queries` into `out`, both of its tokens."""
        assert self._step.prompts is not None
        self._step.prompts.run(queries, (queries, queries), out, 0, False)


def _trial_launch(layout: BlockLayout, group: int, device: torch.device) -> None:
    if layout.head_dim > _MAX_HEAD_DIM:
        raise ValueError(f"no kernel for heads of {layout.head_dim} elements, only up to {_MAX_HEAD_DIM}")
    with on_device(device):
        _OneStep(layout, group, device, prompt_len=2).compute()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _programs(storage: BlockStorage) -> int:
    if storage.device.type != "cuda":
        return _PROGRAMS_OF_INTERPRETER
    side_by_side = occupancy(storage.layout.head_dim, storage.blocks.dtype).num_programs
    return int(torch.cuda.get_device_properties(storage.device).multi_processor_count) * side_by_side
