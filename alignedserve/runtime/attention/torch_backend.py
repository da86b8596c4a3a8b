"""Attention in plain PyTorch: contexts are gathered into buffers, similar lengths together, padded and masked."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.runtime.attention.backend import Contexts
from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.attention.torch_plan import (
    ChunkPlan,
    DecodeBucket,
    DecodePlan,
    LaterReaders,
    Window,
    plan_chunk,
)
from alignedserve.runtime.attention.whole_runs import Runs, ends_of
from alignedserve.runtime.device.arrays import Array
from alignedserve.runtime.kv.layer_kind import CachedLayers
from kernels.attention import PLAIN_SCORES, GatherBuffers, ScoreForm, attend_chunk, attend_decode, gather_context


class GatheredStep(NamedTuple):
    """A StepAttention over buckets."""

    storage: CachedLayers
    buffers: GatherBuffers
    decode_rows: IntArray  # shortest context first
    padded_share: float
    buckets: tuple[DecodeBucket, ...]
    chunk_plans: tuple[ChunkPlan, ...]
    host_arrays: Sequence[Array] = ()
    scores: ScoreForm = PLAIN_SCORES

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """See StepAttention: nothing to bind."""

    def set_last_blocks(self, blocks: IntArray) -> None:
        raise AssertionError("this planner does not plan ahead")

    def decode(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        runs, scores = (self.storage.key_runs(layer), self.storage.value_runs(layer)), self.scores.of_layer(layer)
        for bucket in self.buckets:
            mask = bucket.mask if bucket.window_mask is None or not is_windowed else bucket.window_mask
            rows = slice(bucket.first, bucket.last)
            out[rows] = attend_decode(queries[rows], *runs, bucket.runs, mask, self.buffers, scores)

    def chunks(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        for chunk in self.chunk_plans:
            rows = slice(chunk.first, chunk.last)
            keys, values = self._context(chunk, new, layer)
            mask = chunk.window_mask if is_windowed and chunk.window_mask is not None else chunk.mask
            out[rows] = attend_chunk(queries[rows], keys, values, mask, self.scores.of_layer(layer))

    def _context(self, chunk: ChunkPlan, new: tuple[Tensor, Tensor], layer: int) -> tuple[Tensor, Tensor]:
        layout, storage = self.storage.layout, self.storage
        shape = (chunk.context_len, layout.num_kv_heads, layout.head_dim)
        if chunk.runs is None:
            rows = slice(chunk.first, chunk.last)
            return new[0][rows].view(shape), new[1][rows].view(shape)
        dtype = new[0].dtype
        keys = gather_context(storage.key_runs(layer), chunk.runs, shape, dtype, "keys", self.buffers)
        values = gather_context(storage.value_runs(layer), chunk.runs, shape, dtype, "values", self.buffers)
        return keys, values


class GatheredPlanner:
    """An AttentionPlanner that keeps its buckets from step to step."""

    reads_unused_slots = True
    plans_ahead = False

    def __init__(
        self,
        table: Contexts,
        storage: CachedLayers,
        window: int | None,
        dtype: torch.dtype,
        scores: ScoreForm = PLAIN_SCORES,
        *,
        is_chunked: bool = False,
        whole_runs: Mapping[int, Runs] | None = None,
        whole_in_windows: bool = False,
    ) -> None:
        self._whole_runs = whole_runs if whole_runs is not None else {}
        self._whole_in_windows = whole_in_windows
        self._dtype = dtype
        self._scores = scores
        self._table = table
        self._storage = storage
        self._window = None if window is None else Window(window, is_chunked)
        self._plan: DecodePlan | None = None
        self._buffers = GatherBuffers(storage.device)

    def plan(
        self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray, num_padding: int = 0
    ) -> GatheredStep:
        assert not num_padding, "only the GPU kernels read padding"
        step = self.plan_chunks(chunk_rows, chunk_counts, len(decode_rows))
        plan = self._decode_plan(decode_rows)
        if plan is None:
            return step
        return step._replace(decode_rows=plan.rows, padded_share=plan.padded_share, buckets=plan.buckets)

    def plan_chunks(self, rows: IntArray, counts: IntArray, first: int) -> GatheredStep:
        plans = []
        for place, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
            own = slice(place, place + 1)
            ends = ends_of(self._whole_runs, rows[own], self._table.num_computed[rows[own]], counts[own])
            readers = LaterReaders(ends, self._whole_in_windows)
            window, dtype = self._window, self._dtype
            plans.append(plan_chunk(self._table, self._storage, row, first, count, window, dtype, readers))
            first += count
        step = GatheredStep(self._storage, self._buffers, rows[:0], 0.0, (), tuple(plans))
        return step._replace(scores=self._scores)

    def _decode_plan(self, rows: IntArray) -> DecodePlan | None:
        if not len(rows):
            return None
        if self._plan is None or not self._plan.advance(self._table, rows):
            self._plan = DecodePlan(self._table, self._storage, rows, self._window)
        return self._plan
