"""Attention by the native CPU kernels, which read blocks in place."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from alignedserve.runtime.attention.backend import Contexts
from alignedserve.runtime.attention.sequence_table import IntArray, Runs, ends_of, tokens_of
from alignedserve.runtime.device.arrays import Array
from kernels.cpu.paged_attention import PagedAttention, PagedPlan


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
        `whole_in_windows`: they read them in layers with a window alone.
        """
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
