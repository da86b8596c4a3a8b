"""Attention by the GPU kernels: straight from the blocks, divided evenly over the batch.

A step's plan is a few integers per sequence, computed on the host; the arrays of a batch of so many decodes have the
same sizes whatever their contexts, but for the block tables, which come last (`DecodeGraphs` replays with new ones).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from alignedserve.runtime.block_storage import BlockStorage
from alignedserve.runtime.device_arrays import Array
from alignedserve.runtime.sequences import IntArray, SequenceTable
from kernels.gpu.blocks import BlockTables, BlockView
from kernels.gpu.decode_attention import TILE, DecodeBatch, decode_batch, paged_decode
from kernels.gpu.division import Division, divide
from kernels.gpu.prefill_attention import ChunkBatch, ChunkTiles, chunk_tiles, paged_prefill

# Programs that run on a multiprocessor side by side, so that one loads while another multiplies.
_PROGRAMS_PER_MULTIPROCESSOR = 4
_PROGRAMS_OF_INTERPRETER = 4
_PER_DIVISION, _PER_TILES = len(Division._fields), len(ChunkTiles._fields)


class GpuStep:
    """A StepAttention that reads blocks on the device. Layers can be computed once its arrays are there (`place`)."""

    padded_share = 0.0

    def __init__(
        self, planner: "GpuPlanner", rows: IntArray, *, num_padding: int, chunks: tuple[IntArray, IntArray]
    ) -> None:
        """`chunks`: rows of the sequence table and how many tokens of each."""
        self.decode_rows = rows
        self._planner = planner
        self._num_decodes = len(rows) + num_padding
        self._num_windows = 1 if planner.window is None else 2
        self._decodes: list[DecodeBatch] = []
        self._chunks: ChunkBatch | None = None
        arrays: list[Array] = []
        tables: list[Array] = []
        if self._num_decodes:
            lengths, decode_tables = planner.decode_contexts(rows, num_padding)
            arrays += [lengths, *decode_tables[1:]]
            for window in (None, planner.window)[: self._num_windows]:
                arrays += divide(lengths, tile=TILE, num_programs=planner.num_programs, window=window)
            tables.append(decode_tables[0])
        self._has_chunks = bool(len(chunks[0]))
        if self._has_chunks:
            lengths, chunk_tables = planner.chunk_contexts(*chunks)
            arrays += [*chunk_tables[1:], *chunk_tiles(lengths, chunks[1], group=planner.heads[1])]
            tables.append(chunk_tables[0])
        self._num_tables = len(tables)
        self.host_arrays = (*arrays, *tables)

    def place(self, tensors: Sequence[Tensor]) -> None:
        """See StepAttention."""
        arrays = iter(tensors[: len(tensors) - self._num_tables])
        entries = iter(tensors[len(tensors) - self._num_tables :])
        if self._num_decodes:
            lengths = next(arrays)
            tables = BlockTables(next(entries), next(arrays), next(arrays))
            for _ in range(self._num_windows):
                division = [next(arrays) for _ in range(_PER_DIVISION)]
                self._decodes.append(decode_batch(tables, lengths, division, self._planner.heads))
        if self._has_chunks:
            tables = BlockTables(next(entries), next(arrays), next(arrays))
            self._chunks = ChunkBatch(tables, [next(arrays) for _ in range(_PER_TILES)])

    def set_last_blocks(self, blocks: IntArray) -> None:
        """See StepAttention."""
        lengths, starts = self.host_arrays[:2]
        count = len(self.decode_rows)
        last_columns = (lengths[:count] - 1) // self._planner.block_size
        self.host_arrays[-self._num_tables][starts[:count] + last_columns] = blocks

    def decode(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        """See StepAttention."""
        if self._num_decodes:
            count, window = self._num_decodes, self._planner.window if is_windowed else None
            view = BlockView(self._planner.blocks, layer)
            paged_decode(queries[:count], out[:count], view, self._decodes[window is not None], window=window)

    def chunks(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        """See StepAttention."""
        if self._chunks is not None:
            first, window = self._num_decodes, self._planner.window if is_windowed else None
            view = BlockView(self._planner.blocks, layer)
            paged_prefill(queries[first:], out[first:], view, self._chunks, window=window)


class GpuPlanner:
    """An AttentionPlanner."""

    reads_unused_slots = False
    plans_ahead = True

    def __init__(self, table: SequenceTable, storage: BlockStorage, window: int | None, group: int) -> None:
        self.blocks = storage.blocks
        self.window = window
        self.heads = (storage.layout.num_kv_heads, group, storage.layout.head_dim)
        self.num_programs = max(1, _programs(storage.device) // storage.layout.num_kv_heads)
        self.block_size = table.block_size
        self._table = table
        self._scratch_block = storage.scratch_block

    def plan(
        self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray, num_padding: int = 0
    ) -> GpuStep:
        """See AttentionPlanner. Padding reads one slot of the storage's scratch block."""
        return GpuStep(self, decode_rows, num_padding=num_padding, chunks=(chunk_rows, chunk_counts))

    def decode_contexts(self, rows: IntArray, num_padding: int) -> tuple[Array, tuple[Array, Array, Array]]:
        """Lengths, and the arrays of a BlockTables."""
        lengths = np.concatenate((self._table.num_computed[rows] + 1, np.ones(num_padding, np.int64)))
        scratch = np.full(num_padding, self._scratch_block, np.int32)
        return lengths.astype(np.int32), self._tables(rows, lengths, scratch)

    def chunk_contexts(self, rows: IntArray, counts: IntArray) -> tuple[IntArray, tuple[Array, Array, Array]]:
        """Alike."""
        lengths = self._table.num_computed[rows] + counts
        return lengths, self._tables(rows, lengths, np.empty(0, np.int32))

    def _tables(self, rows: IntArray, lengths: IntArray, scratch: Array) -> tuple[Array, Array, Array]:
        """Every sequence of the engine fills its blocks from the front."""
        widths = -(-lengths // self._table.block_size)
        tables = self._table.block_tables
        own = [tables[row, :width] for row, width in zip(rows.tolist(), widths.tolist(), strict=False)]
        entries = np.concatenate((*own, scratch)).astype(np.int32)
        return entries, (np.cumsum(widths) - widths).astype(np.int32), np.zeros(len(widths), np.int8)


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_OF_INTERPRETER
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * _PROGRAMS_PER_MULTIPROCESSOR
