"""Attention by the GPU kernels: straight from the blocks, divided evenly over the batch."""

import torch
from torch import Tensor

from alignedserve.runtime.block_storage import BlockStorage
from alignedserve.runtime.sequences import IntArray, SequenceTable
from kernels.gpu.blocks import BlockView
from kernels.gpu.decode_attention import TILE, DecodeBatch, decode_batch, paged_decode
from kernels.gpu.division import divide
from kernels.gpu.prefill_attention import ChunkBatch, chunk_batch, paged_prefill

# Programs that run on a multiprocessor side by side, so that one loads while another multiplies.
_PROGRAMS_PER_MULTIPROCESSOR = 4
_PROGRAMS_OF_INTERPRETER = 4


class GpuStep:
    """A StepAttention that reads blocks on the device."""

    padded_share = 0.0

    def __init__(
        self,
        blocks: Tensor,
        window: int | None,
        rows: IntArray,
        decodes: tuple[DecodeBatch | None, DecodeBatch | None],
        chunks: ChunkBatch | None,
    ) -> None:
        """`decodes`: of layers that read whole contexts, and of windowed ones."""
        self.decode_rows = rows
        self._blocks = blocks
        self._window = window
        self._decodes = decodes
        self._chunks = chunks

    def decode(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        """See StepAttention."""
        batch = self._decodes[is_windowed]
        if batch is not None:
            count, window = len(self.decode_rows), self._window if is_windowed else None
            paged_decode(queries[:count], out[:count], BlockView(self._blocks, layer), batch, window=window)

    def chunks(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        """See StepAttention."""
        if self._chunks is not None:
            first, window = len(self.decode_rows), self._window if is_windowed else None
            paged_prefill(queries[first:], out[first:], BlockView(self._blocks, layer), self._chunks, window=window)


class GpuPlanner:
    """An AttentionPlanner. A step's plan is a few integers per sequence, computed on the host and copied once."""

    reads_unused_slots = False

    def __init__(self, table: SequenceTable, storage: BlockStorage, window: int | None, group: int) -> None:
        self._table = table
        self._blocks = storage.blocks
        self._window = window
        self._heads = (storage.layout.num_kv_heads, group, storage.layout.head_dim)
        self._device = storage.device
        self._num_programs = max(1, _programs(storage.device) // storage.layout.num_kv_heads)

    def plan(self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray) -> GpuStep:
        """See AttentionPlanner."""
        chunks = None
        if len(chunk_rows):
            lengths = self._table.num_computed[chunk_rows] + chunk_counts
            tables, forwards = self._tables(chunk_rows, lengths), self._forwards(len(chunk_rows))
            chunks = chunk_batch(tables, forwards, lengths, chunk_counts, group=self._heads[1])
        return GpuStep(self._blocks, self._window, decode_rows, self._decodes(decode_rows), chunks)

    def _decodes(self, rows: IntArray) -> tuple[DecodeBatch | None, DecodeBatch | None]:
        if not len(rows):
            return None, None
        lengths = self._table.num_computed[rows] + 1
        tables, forwards = self._tables(rows, lengths), self._forwards(len(rows))
        on_device = torch.from_numpy(lengths).to(self._device, torch.int32)

        def batch(window: int | None) -> DecodeBatch:
            division = divide(lengths, tile=TILE, num_programs=self._num_programs, window=window)
            return decode_batch(tables, on_device, forwards, division, self._heads)

        whole = batch(None)
        return whole, whole if self._window is None else batch(self._window)

    def _tables(self, rows: IntArray, lengths: IntArray) -> Tensor:
        width = -(-int(lengths.max()) // self._table.block_size)
        return torch.from_numpy(self._table.block_tables[rows, :width]).to(self._device, torch.int32)

    def _forwards(self, count: int) -> Tensor:
        """Every sequence of the engine fills its blocks from the front."""
        return torch.zeros(count, dtype=torch.int8, device=self._device)


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_OF_INTERPRETER
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * _PROGRAMS_PER_MULTIPROCESSOR
