"""Attention of prefill chunks over paged blocks on a GPU: queries in chunks, keys and values cached already.

One program per tile of query tokens and key head; the query heads of the key head are rows of the same tile, so that a
tile of keys is read once for all of them. Longest contexts first: what is left at the end is short. Only the last tiles
of a context hold keys that some of the rows must not see; the others are computed without a mask."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import PLAIN_SCORES, ScoreForm
from kernels.gpu.attention.score_forms import LOG2_E, SCORE_UNIT, capped, first_read
from kernels.gpu.attention.work_partition import Int32Array, Int64Array
from kernels.gpu.blocks import BlockTables, BlockView, cached_elements, cached_scales, widened
from kernels.gpu.launching import (
    LARGE_SHARED_BYTES,
    converts_float8,
    padded,
    power_of_two,
    program_shared_bytes,
    upcast,
)


class Tiling(NamedTuple):
    """The tile sizes for heads of one size, limited by registers and shared memory (see tests.gpu_kernels)."""

    query_rows: int  # tokens x group of a tile
    keys: int  # of a tile
    num_warps: int
    num_stages: int  # 5: two tiles of keys are loaded while one is multiplied; 3: one


def tiling(head_dim: int, dtype: torch.dtype, shared_bytes: int) -> Tiling:
    """Return the largest tiling that does not spill and fits `shared_bytes`, what a program may have; float32 needs
    registers alone, without matrix units."""
    if dtype == torch.float32:
        return Tiling(32, 16, 8, 3)
    if padded(head_dim) > 256:
        return Tiling(64, 32, 8, 3) if shared_bytes >= LARGE_SHARED_BYTES else Tiling(32, 16, 8, 3)
    if padded(head_dim) > 128:
        return Tiling(64, 32, 4, 3)
    return Tiling(128, 64, 8, 5) if shared_bytes >= LARGE_SHARED_BYTES else Tiling(128, 32, 8, 3)


class ChunkTiles(NamedTuple):
    """The query tokens of a step's chunks in tiles, longest context first."""

    sequences: Int32Array  # [tiles] whose tokens
    rows: Int32Array  # [tiles] query row of the tile's first token
    positions: Int32Array  # [tiles] its position
    counts: Int32Array  # [tiles] tokens of the tile


class ChunkBatch(NamedTuple):
    """The inputs of a step's chunks besides queries and blocks, on the device, for every layer."""

    tables: BlockTables
    tiles: Sequence[Tensor]  # the arrays of a ChunkTiles
    ends: Tensor | None = None  # [tokens] int32: behind what each token reads, itself or a later one; None: itself


def chunk_tiles(lengths: Int64Array, counts: Int64Array, *, group: int, query_rows: int) -> ChunkTiles:
    """Cut chunks into tiles: the last counts[i] of the first lengths[i] tokens of sequence i are queries, in
    consecutive rows. `query_rows`: of the tiling."""
    tokens = max(1, query_rows // power_of_two(group))
    num_tiles = -(-counts // tokens)
    sequences = np.repeat(np.arange(len(counts)), num_tiles)
    within = np.arange(len(sequences)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    rows = (np.cumsum(counts) - counts)[sequences] + within * tokens
    positions = (lengths - counts)[sequences] + within * tokens
    taken = np.minimum(counts[sequences] - within * tokens, tokens)
    order = np.argsort(-(positions + taken), kind="stable")
    return ChunkTiles(*(array[order].astype(np.int32) for array in (sequences, rows, positions, taken)))


def paged_prefill(
    queries: Tensor,
    out: Tensor,
    view: BlockView,
    batch: ChunkBatch,
    *,
    window: int | None = None,
    is_chunked: bool = False,
    scores: ScoreForm = PLAIN_SCORES,
) -> None:
    """Compute attention of every query token over the keys and values up to its own, or its end, in the blocks.

    queries, out   [tokens, kv_heads, group, head_dim], dtype of the blocks unless these are FP8, rows possibly strided
    window         how many of the last tokens up to its own a token reads; None: all
    is_chunked     it reads those since the last multiple of the window
    scores         what becomes of scores, with the sinks [heads] of this layer

    Slots behind what a tile of tokens reads are not read."""
    _, kv_heads, group, head_dim = queries.shape
    stride, keys_at, values_at = view.offsets
    padded_group = power_of_two(group)
    query_rows, keys, num_warps, num_stages = tiling(
        head_dim, view.blocks.dtype, program_shared_bytes(view.blocks.device)
    )
    _prefill[(batch.tiles[0].shape[0] * kv_heads,)](
        queries,
        out,
        view.blocks,
        *batch.tables,
        *batch.tiles,
        queries.stride(0),
        out.stride(0),
        stride,
        keys_at,
        values_at,
        queries if batch.ends is None else batch.ends,  # not read, but a pointer must be passed
        queries if scores.sinks is None else scores.sinks,
        window or 0,
        # Weights are powers of 2, which is what the hardware computes.
        LOG2_E / math.sqrt(head_dim),
        (scores.cap or 0.0) * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=view.blocks.shape[3],
        PADDED_GROUP=padded_group,
        ROWS=max(1, query_rows // padded_group) * padded_group,
        PADDED_DIM=padded(head_dim),
        TOKENS=keys,
        UPCAST=upcast(queries.dtype),
        SLOT_WIDTH=view.slot_width,
        HAS_SCALES=view.has_scales,
        CONVERTS_FLOAT8=view.has_scales and converts_float8(view.blocks.device),
        IS_CHUNKED=is_chunked and window is not None,
        HAS_CAP=scores.cap is not None,
        HAS_SINKS=scores.sinks is not None,
        HAS_ENDS=batch.ends is not None,
        num_warps=num_warps,
        num_stages=num_stages,
    )


@triton.jit
def _attend(
    state,
    query,
    first,
    blocks,
    table,
    backwards,
    head,
    block_stride,
    keys_at,
    values_at,
    bounds,
    own,
    ends,
    window,
    scale,
    cap,
    IS_WHOLE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    CONVERTS_FLOAT8: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Return the state (highest score, sum of weights and weighted values of each row) after one more tile of keys,
    from token `first` on. IS_WHOLE: all rows read all of it. `bounds`: first and last token to read."""
    most, total, result = state
    others, dims = first + tl.arange(0, TOKENS), tl.arange(0, PADDED_DIM)
    is_read = others >= 0 if IS_WHOLE else (others >= bounds[0]) & (others < bounds[1])
    is_cached = is_read[:, None] & (dims < HEAD_DIM)[None, :]
    elements = cached_elements(table, others, is_read, backwards, head, block_stride, SLOT_WIDTH, HEAD_DIM, BLOCK_SIZE)
    where = elements[:, None] + dims[None, :]
    keys = widened(tl.load(blocks + keys_at + where, mask=is_cached, other=0), query, HAS_SCALES, CONVERTS_FLOAT8)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if HAS_SCALES:
        scores *= cached_scales(blocks + keys_at, elements, is_read, head, KV_HEADS, HEAD_DIM)[None, :]
    unit = scale
    if HAS_CAP:
        scores, unit = capped(scores * scale, cap), 1.0
    if not IS_WHOLE:
        is_seen = is_read[None, :] & (others[None, :] < ends[:, None])
        is_seen = is_seen & (others[None, :] >= first_read(own, window, IS_CHUNKED)[:, None])
        scores = tl.where(is_seen, scores, -float("inf"))
    higher = tl.maximum(most, tl.max(scores, axis=1) * unit)
    # A row may have read nothing yet: its window begins in a later tile.
    reference = tl.where(higher == -float("inf"), 0.0, higher)
    correction = tl.exp2(most - reference)
    shares = tl.exp2(scores * unit - reference[:, None])
    values = widened(tl.load(blocks + values_at + where, mask=is_cached, other=0), query, HAS_SCALES, CONVERTS_FLOAT8)
    total = total * correction + tl.sum(shares, axis=1)
    if HAS_SCALES:
        shares *= cached_scales(blocks + values_at, elements, is_read, head, KV_HEADS, HEAD_DIM)[None, :]
    result = tl.dot(shares.to(values.dtype), values, result * correction[:, None], input_precision="ieee")
    return higher, total, result


@triton.jit
def _prefill(
    queries,
    out,
    blocks,
    entries,
    starts,
    is_reversed,
    tile_sequences,
    tile_rows,
    tile_positions,
    tile_counts,
    query_stride,
    out_stride,
    block_stride,
    keys_at,
    values_at,
    token_ends,
    sinks,
    window,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    UPCAST: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    CONVERTS_FLOAT8: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
):
    tile, head = tl.program_id(0) // KV_HEADS, (tl.program_id(0) % KV_HEADS).to(tl.int64)
    sequence = tl.load(tile_sequences + tile).to(tl.int64)
    first_row, position, count = tl.load(tile_rows + tile), tl.load(tile_positions + tile), tl.load(tile_counts + tile)
    backwards = tl.load(is_reversed + sequence).to(tl.int32)
    table = entries + tl.load(starts + sequence)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    token, member = rows // PADDED_GROUP, rows % PADDED_GROUP
    is_query = (token < count) & (member < GROUP)
    is_element = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    within = (head * GROUP + member)[:, None] * HEAD_DIM + dims[None, :]
    own_rows = (first_row + token).to(tl.int64)[:, None]
    query = tl.load(queries + own_rows * query_stride + within, mask=is_element, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    context = position + token
    ends, last = context + 1, position + count
    if HAS_ENDS:
        ends = tl.load(token_ends + first_row + token, mask=is_query, other=0)
        last = tl.maximum(last, tl.max(ends, axis=0))
    most = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:  # a key that every row has read, and whose value is 0
        most = tl.load(sinks + head * GROUP + member, mask=is_query, other=0.0) * SCORE_UNIT
        total += 1.0
    result = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    state = (most, total, result)
    earliest = tl.maximum(first_read(position, window, IS_CHUNKED), 0)
    begin = earliest // TOKENS * TOKENS
    # All rows read all of the tiles before that of the first row's token, unless a window excludes them.
    is_cut = (window > 0) & (position + count > window)
    masked = tl.where(is_cut, begin, (position + 1) // TOKENS * TOKENS)
    bounds = (earliest, last)
    for is_masked in tl.static_range(2):  # unrolled: whole tiles, then those with a mask
        for first in range(masked if is_masked else begin, last if is_masked else masked, TOKENS):
            state = _attend(
                state,
                query,
                first,
                blocks,
                table,
                backwards,
                head,
                block_stride,
                keys_at,
                values_at,
                bounds,
                context,
                ends,
                window,
                scale,
                cap,
                is_masked == 0,
                KV_HEADS,
                HEAD_DIM,
                BLOCK_SIZE,
                PADDED_DIM,
                TOKENS,
                SLOT_WIDTH,
                HAS_SCALES,
                CONVERTS_FLOAT8,
                IS_CHUNKED,
                HAS_CAP,
            )
    most, total, result = state
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + own_rows * out_stride + within, (result / total[:, None]).to(out.dtype.element_ty), mask=is_element)
