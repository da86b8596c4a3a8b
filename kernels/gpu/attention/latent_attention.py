"""Latent attention over paged rows on a GPU (DeepSeek-V2, 2.1): one row a token, which is the key and the value.

A row is a key that all heads share and that is rotated, and the latent behind it (`kernels.linear`). The rows
of a tile are loaded once and multiplied twice: with the queries of many heads, and, their latents, with the weights.
Sums of rotated keys are of no use: `out` has nothing in their place.

Decodes are divided over programs as those of other models are, and merged by the same kernel (`decode_attention`); the
heads, of which there are many, over as many programs again as it takes. Chunks are cut into tiles of tokens and heads.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.decode_attention import DecodeBatch, merge_parts
from kernels.gpu.attention.prefill_attention import ChunkBatch
from kernels.gpu.attention.score_forms import LOG2_E
from kernels.gpu.blocks import BlockView, cached_elements, cached_scales, widened
from kernels.gpu.launching import (
    LARGE_SHARED_BYTES,
    CompiledKernel,
    converts_float8,
    has_tensor_memory,
    padded,
    parts_of,
    power_of_two,
    program_shared_bytes,
    upcast,
)


class LatentTiling(NamedTuple):
    """How a program walks over the rows of a context."""

    query_rows: int  # heads of one token, or, where a model has fewer, of several
    tokens: int  # of a tile
    num_warps: int
    num_stages: int

    def heads(self, num_heads: int) -> int:
        """Return of how many of a token's heads, a power of two, a program has rows."""
        return min(self.query_rows, power_of_two(num_heads))


def latent_tiling(dtype: torch.dtype, device: torch.device) -> LatentTiling:
    """Return the tiling for rows of this dtype on a GPU."""
    shared_bytes = program_shared_bytes(device)
    if dtype == torch.float32:
        return LatentTiling(16, 16, 8, 2)
    if dtype == torch.uint8:  # whose values take registers before they are multiplied
        return LatentTiling(32, 32, 8, 2) if shared_bytes >= LARGE_SHARED_BYTES else LatentTiling(16, 16, 4, 2)
    if shared_bytes < LARGE_SHARED_BYTES:
        return LatentTiling(32, 16, 8, 2)
    # With more rows sums leave tensor memory for the stack, by compiled code.
    return LatentTiling(32, 32, 8, 2) if has_tensor_memory(device) else LatentTiling(64, 64, 8, 2)


def tiling_of(view: BlockView) -> LatentTiling:
    return latent_tiling(view.blocks.dtype, view.blocks.device)


def latent_decode(
    queries: Tensor, out: Tensor, view: BlockView, batch: DecodeBatch, *, rank: int, tiling: LatentTiling | None = None
) -> CompiledKernel | None:
    """Compute attention of one query token per context over its rows, its own included, in the blocks.

    queries, out   [sequences, 1, heads, row_width], dtype of the blocks unless these are FP8, rows possibly strided;
                   the last `rank` elements of a head of `out` are written
    batch          whose heads are 1, heads, rank, and whose tiles are those of the tiling
    tiling         None: the one for this GPU

    Slots outside a context are not read. Returns the kernel that computed the parts; None in Triton's interpreter."""
    _, _, num_heads, width = queries.shape
    sizes = tiling or tiling_of(view)
    heads = max(sizes.heads(num_heads), padded(1))
    stride, rows_at, _ = view.offsets
    part_rows, part_firsts, part_lasts, program_parts, row_parts = batch.partition
    # The programs of one run of tiles lie side by side, as they read the same rows.
    compiled: CompiledKernel | None = _decode_latents[(parts_of(num_heads, heads), program_parts.shape[0] - 1)](
        queries,
        view.blocks,
        *batch.tables,
        batch.lengths,
        part_rows,
        part_firsts,
        part_lasts,
        program_parts,
        batch.sums,
        batch.weights,
        queries.stride(0),
        stride,
        rows_at,
        LOG2_E / math.sqrt(width),
        NUM_HEADS=num_heads,
        HEADS=heads,
        TOKENS=sizes.tokens,
        **_sizes(view, width, rank, queries.dtype),
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )
    merge_parts(out, row_parts, batch, heads=num_heads, head_dim=rank, out_width=width)
    return compiled


def latent_prefill(
    queries: Tensor, out: Tensor, view: BlockView, batch: ChunkBatch, *, rank: int, tiling: LatentTiling | None = None
) -> None:
    """Compute attention of every query token over the rows up to its own, in the blocks.

    queries, out   [tokens, 1, heads, row_width]; see `latent_decode`
    batch          whose tiles have as many tokens as a program has rows for all heads that it takes

    Slots behind a token's position are not read."""
    _, _, num_heads, width = queries.shape
    sizes = tiling or tiling_of(view)
    heads = sizes.heads(num_heads)
    stride, rows_at, _ = view.offsets
    _prefill_latents[(batch.tiles[0].shape[0] * parts_of(num_heads, heads),)](
        queries,
        out,
        view.blocks,
        *batch.tables,
        *batch.tiles,
        queries.stride(0),
        out.stride(0),
        stride,
        rows_at,
        LOG2_E / math.sqrt(width),
        NUM_HEADS=num_heads,
        HEADS=heads,
        ROWS=max(padded(1), sizes.query_rows // heads * heads),
        TOKENS=sizes.tokens,
        **_sizes(view, width, rank, queries.dtype),
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )


def _sizes(view: BlockView, width: int, rank: int, dtype: torch.dtype) -> dict[str, int | bool]:
    return {
        "WIDTH": width,
        "RANK": rank,
        "PADDED_RANK": padded(rank),
        "PADDED_ROPE": padded(width - rank),
        "BLOCK_SIZE": view.blocks.shape[3],
        "UPCAST": upcast(dtype),
        "SLOT_WIDTH": view.slot_width,
        "HAS_SCALES": view.has_scales,
        "CONVERTS_FLOAT8": view.has_scales and converts_float8(view.blocks.device),
    }


@triton.jit
def _query(
    queries,
    at,
    is_row,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    turned, dims = tl.arange(0, PADDED_ROPE), tl.arange(0, PADDED_RANK)
    rope: tl.constexpr = WIDTH - RANK
    pointers = queries + at[:, None]
    first = tl.load(pointers + turned[None, :], mask=is_row[:, None] & (turned < rope)[None, :], other=0.0)
    second = tl.load(pointers + rope + dims[None, :], mask=is_row[:, None] & (dims < RANK)[None, :], other=0.0)
    if UPCAST:
        first, second = first.to(tl.float32), second.to(tl.float32)
    return first, second


@triton.jit
def _attend(
    state,
    query,
    tokens,
    is_read,
    is_seen,
    rows,
    table,
    backwards,
    block_stride,
    scale,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    CONVERTS_FLOAT8: tl.constexpr,
):
    """Return the state (highest score, sum of weights and weighted latents of each query) after one more tile.

    `rows`: those of the layer in block 0. `is_seen`: of each query, or of all, which tokens count."""
    most, total, result = state
    turned, dims = tl.arange(0, PADDED_ROPE), tl.arange(0, PADDED_RANK)
    rope: tl.constexpr = WIDTH - RANK
    elements = cached_elements(table, tokens, is_read, backwards, 0, block_stride, SLOT_WIDTH, WIDTH, BLOCK_SIZE)
    pointers = rows + elements[:, None]
    keys = tl.load(pointers + turned[None, :], mask=is_read[:, None] & (turned < rope)[None, :], other=0)
    latents = tl.load(pointers + rope + dims[None, :], mask=is_read[:, None] & (dims < RANK)[None, :], other=0)
    keys = widened(keys, query[0], HAS_SCALES, CONVERTS_FLOAT8)
    latents = widened(latents, query[1], HAS_SCALES, CONVERTS_FLOAT8)
    scores = tl.dot(query[1], tl.trans(latents), input_precision="ieee")
    scores = tl.dot(query[0], tl.trans(keys), scores, input_precision="ieee") * scale
    if HAS_SCALES:
        scales = cached_scales(rows, elements, is_read, 0, 1, WIDTH)
        scores *= scales[None, :]
    scores = tl.where(is_seen, scores, -float("inf"))
    higher = tl.maximum(most, tl.max(scores, axis=1))
    # A query may have read nothing yet: that of no head, or of a token before this tile.
    reference = tl.where(higher == -float("inf"), 0.0, higher)
    correction, shares = tl.exp2(most - reference), tl.exp2(scores - reference[:, None])
    total = total * correction + tl.sum(shares, axis=1)
    if HAS_SCALES:
        shares *= scales[None, :]
    result = tl.dot(shares.to(latents.dtype), latents, result * correction[:, None], input_precision="ieee")
    return higher, total, result


@triton.jit
def _decode_latents(
    queries,
    blocks,
    entries,
    starts,
    is_reversed,
    lengths,
    part_rows,
    part_firsts,
    part_lasts,
    program_parts,
    sums,
    weights,
    query_stride,
    block_stride,
    rows_at,
    scale,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    CONVERTS_FLOAT8: tl.constexpr,
):
    program = tl.program_id(1)
    heads, dims = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, PADDED_RANK)
    is_head = heads < NUM_HEADS
    for part in range(tl.load(program_parts + program), tl.load(program_parts + program + 1)):
        row = tl.load(part_rows + part)
        length, backwards = tl.load(lengths + row), tl.load(is_reversed + row).to(tl.int32)
        table = entries + tl.load(starts + row)
        at = row.to(tl.int64) * query_stride + heads * WIDTH
        query = _query(queries, at, is_head, WIDTH, RANK, PADDED_ROPE, PADDED_RANK, UPCAST)
        most = tl.full((HEADS,), -float("inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        result = tl.zeros((HEADS, PADDED_RANK), tl.float32)
        state = (most, total, result)
        for tile in range(tl.load(part_firsts + part), tl.load(part_lasts + part)):
            tokens = tile * TOKENS + tl.arange(0, TOKENS)
            is_read = tokens < length
            state = _attend(
                state,
                query,
                tokens,
                is_read,
                is_read[None, :],
                blocks + rows_at,
                table,
                backwards,
                block_stride,
                scale,
                WIDTH,
                RANK,
                PADDED_RANK,
                PADDED_ROPE,
                BLOCK_SIZE,
                SLOT_WIDTH,
                HAS_SCALES,
                CONVERTS_FLOAT8,
            )
        most, total, result = state
        own = part * NUM_HEADS + heads.to(tl.int64)
        is_sum = is_head[:, None] & (dims < RANK)[None, :]
        tl.store(sums + own[:, None] * RANK + dims[None, :], result, mask=is_sum)
        tl.store(weights + own * 2, most, mask=is_head)
        tl.store(weights + own * 2 + 1, total, mask=is_head)


@triton.jit
def _prefill_latents(
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
    rows_at,
    scale,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    CONVERTS_FLOAT8: tl.constexpr,
):
    num_parts: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    tile, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    sequence = tl.load(tile_sequences + tile).to(tl.int64)
    first_row, position, count = tl.load(tile_rows + tile), tl.load(tile_positions + tile), tl.load(tile_counts + tile)
    backwards = tl.load(is_reversed + sequence).to(tl.int32)
    table = entries + tl.load(starts + sequence)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED_RANK)
    token, head = rows // HEADS, part * HEADS + rows % HEADS
    is_query = (token < count) & (head < NUM_HEADS)
    own_rows = (first_row + token).to(tl.int64)
    query = _query(
        queries, own_rows * query_stride + head * WIDTH, is_query, WIDTH, RANK, PADDED_ROPE, PADDED_RANK, UPCAST
    )
    context = position + token
    most = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, PADDED_RANK), tl.float32)
    state = (most, total, result)
    for first in range(0, position + count, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        is_read = tokens < position + count
        state = _attend(
            state,
            query,
            tokens,
            is_read,
            is_read[None, :] & (tokens[None, :] <= context[:, None]),
            blocks + rows_at,
            table,
            backwards,
            block_stride,
            scale,
            WIDTH,
            RANK,
            PADDED_RANK,
            PADDED_ROPE,
            BLOCK_SIZE,
            SLOT_WIDTH,
            HAS_SCALES,
            CONVERTS_FLOAT8,
        )
    most, total, result = state
    at = own_rows * out_stride + head * WIDTH + (WIDTH - RANK)
    is_written = is_query[:, None] & (dims < RANK)[None, :]
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=is_written)
