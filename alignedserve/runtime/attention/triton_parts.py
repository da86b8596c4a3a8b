"""The parts of a step on a GPU: a token of each sequence, and chunks of others, over contexts in blocks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from alignedserve.runtime.attention.library_steps import Chunks
from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.device.arrays import Array
from kernels.gpu.attention.decode_attention import DecodeBatch, decode_batch, paged_decode
from kernels.gpu.attention.latent_attention import latent_decode, latent_prefill
from kernels.gpu.attention.prefill_attention import ChunkBatch, chunk_tiles, paged_prefill
from kernels.gpu.attention.work_partition import WorkPartition, partition
from kernels.gpu.blocks import BlockView
from kernels.gpu.launching import CompiledKernel

if TYPE_CHECKING:
    from alignedserve.runtime.attention.triton_backend import GpuPlanner


class GpuStep:
    """A StepAttention that reads blocks on the device. Layers can be computed once its arrays are bound."""

    padded_share = 0.0

    def __init__(
        self,
        rows: IntArray,
        decodes: "Decodes | None",
        chunks: Chunks | None,
    ) -> None:
        self.decode_rows = rows
        self.decodes = decodes
        self.prompts = chunks
        self._parts: list[Chunks | Decodes] = [part for part in (chunks, decodes) if part is not None]
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
        more = ({window: batch._replace(tables=own) for window, batch in batches.items()} for own in others)
        self._batches = [batches, *more]

    def run(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> CompiledKernel | None:
        planner = self._planner
        window = planner.window if is_windowed else None
        table, place = planner.place_of(layer)
        view, batch = BlockView(planner.storage.blocks, place), self._batches[table][window]
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
        self._batches = [ChunkBatch(own, tiles, ends) for own in tables]

    def run(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        assert self._batches, "a layer is computed before its arrays are bound"
        planner = self._planner
        window = planner.window if is_windowed else None
        table, place = planner.place_of(layer)
        view, batch = BlockView(planner.storage.blocks, place), self._batches[table]
        if planner.latent_rank is not None:
            latent_prefill(queries, out, view, batch, rank=planner.latent_rank)
            return
        scores = planner.scores.of_layer(layer)
        if window is None and planner.whole_in_windows:
            batch = batch._replace(ends=None)
        paged_prefill(queries, out, view, batch, window=window, is_chunked=planner.is_chunked, scores=scores)
