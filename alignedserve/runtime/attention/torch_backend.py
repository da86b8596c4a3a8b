"""Attention in plain PyTorch: contexts are gathered into buffers, similar lengths together, padded and masked.

The plan of a decode batch is kept: while the same sequences decode one token per step, a step changes one entry per
sequence, whatever the context length. It is rebuilt when the batch changes or a bucket runs out of slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.runtime.attention.backend import Contexts
from alignedserve.runtime.attention.sequence_table import IntArray, Runs, ends_of
from alignedserve.runtime.device.arrays import Array
from alignedserve.runtime.kv.block_storage import CachedLayers
from kernels.attention import (
    PLAIN_SCORES,
    GatherBuffers,
    RunSelection,
    ScoreForm,
    attend_chunk,
    attend_decode,
    gather_context,
)

FloatArray = npt.NDArray[np.float32]

# Gathered keys and values of one bucket should stay in the second-level caches of a few cores ...
_BUCKET_BYTES = 2 << 20
# ... but fewer sequences than this leave cores idle.
_MIN_BUCKET_SEQUENCES = 4
# The fixed cost of one attention call, as bytes that it could read in that time: 24 us, at 0.76 us for 16 KiB (two
# cores, Zen 4; an earlier benchmark compared predictions from it with measurements).
_CALL_BYTES = 512 << 10
# Tokens that each bucket can grow before the plan is rebuilt.
_SPARE_TOKENS = 8


class ReadWindow(NamedTuple):
    """The tokens that a windowed layer reads: the last ones, or those since the last multiple of the size."""

    size: int
    is_chunked: bool = False

    def first_read(self, lengths: IntArray) -> IntArray:
        return (lengths - 1) // self.size * self.size if self.is_chunked else lengths - self.size


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Sequences of similar length with one new token each: token rows `first` to `last` (excluded) of the batch."""

    first: int
    last: int
    runs: RunSelection  # [(last - first) * blocks]
    mask: Tensor  # [last - first, 1, 1, blocks * block_size] float32: 0 or -inf
    window_mask: Tensor | None  # the same for windowed layers; None where the window excludes nothing


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Several new tokens of one sequence: token rows `first` to `last` (excluded) of the batch."""

    first: int
    last: int
    context_len: int  # tokens before the chunk and in it
    runs: RunSelection | None  # all blocks of the context; None: the new tokens are all, as they are
    mask: Tensor | None  # [last - first, context_len]; None: causal over the chunk alone
    window_mask: Tensor | None  # the same for windowed layers; None: as `mask`


class DecodePlan:
    """Buckets over decoding sequences, shortest context first, with one new token each.

    `padded_share`: share of attention's time spent on slots that only a longer sequence of the same bucket needs, for
    the lengths at which the plan was built; until it is rebuilt, all of them grow alike."""

    def __init__(self, table: Contexts, storage: CachedLayers, rows: IntArray, window: ReadWindow | None) -> None:
        """`rows`: the sequences; the position of each one's new token is its num_computed."""
        lengths = table.num_computed[rows] + 1
        self.order = np.argsort(lengths, kind="stable")  # position in `rows` of each bucket row
        self.rows = rows[self.order]
        self._table = table
        self._version = table.version
        self._requested_rows = rows
        self._window = window
        self._device = storage.device
        self._run_stride = storage.run_stride
        self._lengths = lengths[self.order]  # context of each row, new token included
        self._build(storage)

    def advance(self, table: Contexts, rows: IntArray) -> bool:
        """Advance every row by one token; return False, changing nothing, when the plan does not fit this step."""
        if self._version != table.version or not np.array_equal(rows, self._requested_rows):
            return False
        lengths = table.num_computed[self.rows] + 1
        if not np.array_equal(lengths, self._lengths + 1) or (lengths > self._capacities).any():
            return False
        if self._window is not None and self._window.is_chunked and (self._lengths % self._window.size == 0).any():
            return False  # a part has ended
        self._lengths = lengths
        last = lengths - 1
        columns = last // table.block_size
        self._run_ids[self._run_offsets + columns] = table.block_tables[self.rows, columns] * self._run_stride
        self._mask[self._mask_offsets + last] = 0.0
        if self._window_mask is not None and self._window is not None:
            self._window_mask[self._mask_offsets + last] = 0.0
            if not self._window.is_chunked:
                is_past = last >= self._window.size
                self._window_mask[(self._mask_offsets + last - self._window.size)[is_past]] = -np.inf
        return True

    @property
    def buckets(self) -> tuple[DecodeBucket, ...]:
        if self._device.type == "cpu":
            return self._buckets
        return self._make_buckets()

    def _build(self, storage: CachedLayers) -> None:
        table, block_size = self._table, self._table.block_size
        blocks = -(-(self._lengths + _SPARE_TOKENS) // block_size)
        bytes_per_block = storage.layout.block_bytes // storage.layout.num_layers
        self._bounds = bucket_bounds(blocks.tolist(), max(1, _BUCKET_BYTES // bytes_per_block))
        widths = np.empty_like(blocks)
        for first, last in self._bounds:
            widths[first:last] = blocks[last - 1]
        self._capacities = np.minimum(widths, table.block_tables.shape[1]) * block_size
        widths = self._capacities // block_size
        # Rounding up to blocks and spare tokens are not padding: a batch of equal lengths reads them as well.
        num_padded = int((widths - np.minimum(blocks, widths)).sum())
        self.padded_share = num_padded / (int(widths.sum()) + len(self._bounds) * _CALL_BYTES / bytes_per_block)
        self._run_offsets = np.cumsum(widths) - widths
        self._mask_offsets = self._run_offsets * block_size
        self._run_ids = self._build_run_ids(widths)
        self._mask = self._build_mask(widths, None)
        self._window_mask = None
        if self._window is not None and (self._capacities > self._window.size).any():
            self._window_mask = self._build_mask(widths, self._window)
        self._buckets = self._make_buckets()

    def _build_run_ids(self, widths: IntArray) -> IntArray:
        run_ids = np.empty(int(widths.sum()), np.int64)
        used = -(-self._lengths // self._table.block_size)
        for first, last in self._bounds:
            width = int(widths[first])
            tables = self._table.block_tables[self.rows[first:last], :width]
            # Padding repeats the sequence's own first block: written, so finite, and masked.
            columns = np.arange(width)
            chosen = np.where(columns < used[first:last, None], tables, tables[:, :1])
            start = int(self._run_offsets[first])
            run_ids[start : start + chosen.size] = chosen.ravel()
        return run_ids * self._run_stride

    def _build_mask(self, widths: IntArray, window: ReadWindow | None) -> FloatArray:
        block_size = self._table.block_size
        mask = np.zeros(int(widths.sum()) * block_size, np.float32)
        for first, last in self._bounds:
            tokens = int(widths[first]) * block_size
            start = int(self._mask_offsets[first])
            lengths = self._lengths[first:last, None]
            positions = np.arange(tokens)
            is_hidden = positions >= lengths
            if window is not None:
                is_hidden |= positions < window.first_read(lengths)
            mask[start : start + (last - first) * tokens].reshape(last - first, tokens)[is_hidden] = -np.inf
        return mask

    def _make_buckets(self) -> tuple[DecodeBucket, ...]:
        run_ids = torch.from_numpy(self._run_ids).to(self._device)
        mask = torch.from_numpy(self._mask).to(self._device)
        window_mask = None if self._window_mask is None else torch.from_numpy(self._window_mask).to(self._device)
        return tuple(self._make_bucket(bounds, run_ids, mask, window_mask) for bounds in self._bounds)

    def _make_bucket(
        self, bounds: tuple[int, int], run_ids: Tensor, mask: Tensor, window_mask: Tensor | None
    ) -> DecodeBucket:
        first, last = bounds
        count, tokens = last - first, int(self._capacities[first])
        start = int(self._mask_offsets[first])
        run_span = slice(
            int(self._run_offsets[first]), int(self._run_offsets[first]) + count * tokens // self._table.block_size
        )
        slots = slice(start, start + count * tokens)
        shape = (count, 1, 1, tokens)
        return DecodeBucket(
            first=first,
            last=last,
            runs=RunSelection(run_ids[run_span], self._reversed_runs(first, last, tokens // self._table.block_size)),
            mask=mask[slots].view(shape),
            window_mask=None if window_mask is None else window_mask[slots].view(shape),
        )

    def _reversed_runs(self, first: int, last: int, width: int) -> Tensor | None:
        is_reversed = self._table.is_reversed[self.rows[first:last]]
        if not is_reversed.any():
            return None
        return torch.from_numpy(np.flatnonzero(np.repeat(is_reversed, width))).to(self._device)


def bucket_bounds(blocks: list[int], max_blocks: int) -> list[tuple[int, int]]:
    """Split sequences, given their numbers of blocks in ascending order, into runs [first, last). All sequences of a
    bucket are padded to its longest, which exceeds its shortest by at most a quarter and one block. A bucket holds at
    most `max_blocks` blocks after padding, but may always hold a handful of sequences of similar length."""
    bounds = []
    first = 0
    for index, length in enumerate(blocks):
        count = index - first
        is_wasteful = length > blocks[first] + blocks[first] // 4 + 1
        is_full = count >= _MIN_BUCKET_SEQUENCES and (count + 1) * length > max_blocks
        if is_wasteful or is_full:
            bounds.append((first, index))
            first = index
    if blocks:
        bounds.append((first, len(blocks)))
    return bounds


class LaterReaders(NamedTuple):
    """Tokens of a chunk that read later tokens of the chunk."""

    ends: IntArray | None = None  # see `ends_of`
    in_windows_alone: bool = False  # in layers without a window they read none


_NO_LATER = LaterReaders()


def plan_chunk(
    table: Contexts,
    storage: CachedLayers,
    row: int,
    first: int,
    num_tokens: int,
    window: ReadWindow | None,
    dtype: torch.dtype,
    later: LaterReaders = _NO_LATER,
) -> ChunkPlan:
    """Plan the next `num_tokens` tokens of the sequence in `row`, which are token rows from `first` on.

    `dtype`: of queries. Where the cache rounds, new tokens too are read from it: however a prompt is cut, its results
    are the same."""
    before = int(table.num_computed[row])
    context_len = before + num_tokens
    runs = None
    if before or storage.layout.has_scales:
        num_blocks = -(-context_len // table.block_size)
        run_ids = torch.from_numpy(table.block_tables[row, :num_blocks] * storage.run_stride).to(storage.device)
        reversed_at = torch.arange(num_blocks, device=storage.device) if table.is_reversed[row] else None
        runs = RunSelection(run_ids, reversed_at)
    is_window_narrow = window is not None and context_len > window.size
    ends, full_ends = later.ends, None if later.in_windows_alone else later.ends
    is_window_narrow |= later.in_windows_alone and ends is not None and window is not None
    is_masked = before > 0 or full_ends is not None
    return ChunkPlan(
        first=first,
        last=first + num_tokens,
        context_len=context_len,
        runs=runs,
        mask=_chunk_mask(before, num_tokens, None, dtype, storage.device, full_ends) if is_masked else None,
        window_mask=_chunk_mask(before, num_tokens, window, dtype, storage.device, ends) if is_window_narrow else None,
    )


def _chunk_mask(
    before: int,
    num_tokens: int,
    window: ReadWindow | None,
    dtype: torch.dtype,
    device: torch.device,
    ends: IntArray | None = None,
) -> Tensor:
    positions = torch.arange(before, before + num_tokens, device=device)[:, None]
    others = torch.arange(before + num_tokens, device=device)
    is_hidden = others > positions if ends is None else others >= torch.from_numpy(ends).to(device)[:, None]
    if window is not None:
        first = positions // window.size * window.size if window.is_chunked else positions - window.size + 1
        is_hidden |= others < first
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(is_hidden, -float("inf"))


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
        self._window = None if window is None else ReadWindow(window, is_chunked)
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
        for index, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
            span = slice(index, index + 1)
            ends = ends_of(self._whole_runs, rows[span], self._table.num_computed[rows[span]], counts[span])
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
