"""Decode attention over paged blocks on a GPU, its work divided evenly over the batch (see `work_partition`).

Two kernels. The first computes parts of contexts, one program per run of tiles and key head: all query heads of the key
head at once, scores, softmax and sums in one pass. The second merges the parts of each context by their maxima and
sums. FlashDecoding splits every context into equally many pieces; here the pieces are equally long."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import PLAIN_SCORES, ScoreForm
from kernels.gpu.attention.score_forms import LOG2_E, SCORE_UNIT, capped, first_read
from kernels.gpu.blocks import BlockTables, BlockView, cached_elements, cached_scales, widened
from kernels.gpu.launching import (
    LARGE_SHARED_BYTES,
    CompiledKernel,
    converts_float8,
    padded,
    program_shared_bytes,
    upcast,
)

TILE = 64  # tokens
_TILE_OF_LARGE_HEADS = 16  # above 256 elements, of which more do not fit registers
_WARPS = 4
# Parts of a context merged at a time: one long context in a small batch has a part in every program. By more warps, or
# for several heads at a time, merging takes up to twice as long, seen on an H100.
_PARTS, _MERGING_WARPS = 16, 2


# Stages by bytes of a head, up to these: 5: the next tile is loaded while one is computed; 3: after it.
_STAGES = ((256, 5), (1024, 3))


class DecodeTiling(NamedTuple):
    """How a program walks over a run of tokens."""

    keys: int  # of a tile; those of the partition
    num_warps: int
    num_stages: int


def decode_tiling(head_dim: int, dtype: torch.dtype, shared_bytes: int) -> DecodeTiling:
    """Return the tiling for heads of this size where a program may have `shared_bytes` of shared memory."""
    head_bytes = padded(head_dim) * dtype.itemsize
    num_stages = next((number for limit, number in _STAGES if head_bytes <= limit), _STAGES[-1][1])
    if shared_bytes < LARGE_SHARED_BYTES:  # more would leave room for one program only
        num_stages = _STAGES[-1][1]
    return DecodeTiling(TILE if padded(head_dim) <= 256 else _TILE_OF_LARGE_HEADS, _WARPS, num_stages)


class DecodeBatch(NamedTuple):
    """The inputs of a step's decode attention besides queries and blocks, on the device, for every layer."""

    tables: BlockTables
    lengths: Tensor  # [rows] int32, tokens of each context
    partition: Sequence[Tensor]  # the arrays of a WorkPartition
    sums: Tensor  # [parts, kv_heads, group, head_dim] float32: scratch
    weights: Tensor  # [parts, kv_heads, group, 2] float32: scratch, maxima of scores (base 2) and sums of weights


def decode_batch(
    tables: BlockTables, lengths: Tensor, partition: Sequence[Tensor], heads: tuple[int, int, int]
) -> DecodeBatch:
    """Build a batch and allocate its scratch memory. `heads`: kv_heads, group, head_dim."""
    shape, device = (len(partition[0]), *heads), lengths.device
    sums = torch.empty(shape, dtype=torch.float32, device=device)
    weights = torch.empty((*shape[:3], 2), dtype=torch.float32, device=device)
    return DecodeBatch(tables, lengths, partition, sums, weights)


def paged_decode(
    queries: Tensor,
    out: Tensor,
    view: BlockView,
    batch: DecodeBatch,
    *,
    window: int | None = None,
    is_chunked: bool = False,
    scores: ScoreForm = PLAIN_SCORES,
    tiling: DecodeTiling | None = None,
) -> CompiledKernel | None:
    """Compute attention of one query token per context over its keys and values, its own included, in the blocks.

    queries, out   [rows, kv_heads, group, head_dim], dtype of the blocks unless these are FP8, rows possibly strided
    window         how many of the last tokens are read; None: all
    is_chunked     those since the last multiple of the window are read
    scores         what becomes of scores, with the sinks [heads] of this layer
    tiling         None: the one for this GPU; its tiles are those of the batch's partition

    Slots outside a context are not read. Returns the kernel that computed the parts; None in Triton's interpreter."""
    _, kv_heads, group, head_dim = queries.shape
    block_size = view.blocks.shape[3]
    stride, keys_at, values_at = view.offsets
    padded_group, padded_dim = padded(group), padded(head_dim)
    part_rows, part_firsts, part_lasts, program_parts, row_parts = batch.partition
    num_programs = program_parts.shape[0] - 1
    keys, num_warps, num_stages = tiling or decode_tiling(
        head_dim, view.blocks.dtype, program_shared_bytes(view.blocks.device)
    )
    # The programs of one run of tiles lie side by side, so that the heads of a token are read at about the same time:
    # they are neighbours in memory.
    compiled: CompiledKernel | None = _decode_parts[(kv_heads, num_programs)](
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
        keys_at,
        values_at,
        window or 0,
        # Weights are powers of 2, which is what the hardware computes.
        LOG2_E / math.sqrt(head_dim),
        (scores.cap or 0.0) * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        PADDED_GROUP=padded_group,
        PADDED_DIM=padded_dim,
        TOKENS=keys,
        UPCAST=upcast(queries.dtype),
        SLOT_WIDTH=view.slot_width,
        HAS_SCALES=view.has_scales,
        CONVERTS_FLOAT8=view.has_scales and converts_float8(view.blocks.device),
        IS_CHUNKED=is_chunked and window is not None,
        HAS_CAP=scores.cap is not None,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    merge_parts(out, row_parts, batch, heads=kv_heads * group, head_dim=head_dim, sinks=scores.sinks)
    return compiled


def merge_parts(
    out: Tensor,
    row_parts: Tensor,
    batch: DecodeBatch,
    *,
    heads: int,
    head_dim: int,
    out_width: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Merge what was computed of each context, by the maxima and sums of its parts, into its row of `out`.

    row_parts   [rows + 1] of the WorkPartition
    head_dim    of the batch's sums
    out_width   elements of a head of `out`, of which the last `head_dim` are written; None: those alone
    sinks       [heads] float32, see ScoreForm; None: there are none"""
    _merge_parts[(out.shape[0], heads)](
        out,
        row_parts,
        batch.sums,
        batch.weights,
        batch.weights if sinks is None else sinks,  # not read, but a pointer must be passed
        out.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        OUT_WIDTH=out_width or head_dim,
        PADDED_DIM=padded(head_dim),
        PARTS=_PARTS,
        HAS_SINKS=sinks is not None,
        num_warps=_MERGING_WARPS,
    )


@triton.jit
def _decode_parts(
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
    keys_at,
    values_at,
    window,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    UPCAST: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    CONVERTS_FLOAT8: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    head, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    members, dims, places = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM), tl.arange(0, TOKENS)
    is_member = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    for part in range(tl.load(program_parts + program), tl.load(program_parts + program + 1)):
        row = tl.load(part_rows + part)
        length, backwards = tl.load(lengths + row), tl.load(is_reversed + row).to(tl.int32)
        earliest = first_read(length - 1, window, IS_CHUNKED)
        table = entries + tl.load(starts + row)
        at = row.to(tl.int64) * query_stride + head * GROUP * HEAD_DIM
        query = tl.load(queries + at + members[:, None] * HEAD_DIM + dims[None, :], mask=is_member, other=0.0)
        if UPCAST:
            query = query.to(tl.float32)
        most = tl.full((PADDED_GROUP,), -float("inf"), tl.float32)
        total = tl.zeros((PADDED_GROUP,), tl.float32)
        result = tl.zeros((PADDED_GROUP, PADDED_DIM), tl.float32)
        for tile in range(tl.load(part_firsts + part), tl.load(part_lasts + part)):
            tokens = tile * TOKENS + places
            is_read = (tokens < length) & (tokens >= earliest)
            elements = cached_elements(
                table, tokens, is_read, backwards, head, block_stride, SLOT_WIDTH, HEAD_DIM, BLOCK_SIZE
            )
            where = elements[:, None] + dims[None, :]
            is_element = is_read[:, None] & (dims < HEAD_DIM)[None, :]
            keys = widened(
                tl.load(blocks + keys_at + where, mask=is_element, other=0), query, HAS_SCALES, CONVERTS_FLOAT8
            )
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
            if HAS_SCALES:
                scores *= cached_scales(blocks + keys_at, elements, is_read, head, KV_HEADS, HEAD_DIM)[None, :]
            if HAS_CAP:
                scores = capped(scores, cap)
            scores = tl.where(is_read[None, :], scores, -float("inf"))
            higher = tl.maximum(most, tl.max(scores, axis=1))
            # The first tile that is read holds a token at least, so the maximum is a number from then on.
            correction = tl.where(most == -float("inf"), 0.0, tl.exp2(most - higher))
            shares = tl.where(is_read[None, :], tl.exp2(scores - higher[:, None]), 0.0)
            total = total * correction + tl.sum(shares, axis=1)
            values = widened(
                tl.load(blocks + values_at + where, mask=is_element, other=0), query, HAS_SCALES, CONVERTS_FLOAT8
            )
            if HAS_SCALES:
                shares *= cached_scales(blocks + values_at, elements, is_read, head, KV_HEADS, HEAD_DIM)[None, :]
            result = result * correction[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
            most = higher
        heads = (part * KV_HEADS + head) * GROUP + members
        tl.store(sums + heads[:, None] * HEAD_DIM + dims[None, :], result, mask=is_member)
        tl.store(weights + heads * 2, most, mask=members < GROUP)
        tl.store(weights + heads * 2 + 1, total, mask=members < GROUP)


@triton.jit
def _merge_parts(
    out,
    row_parts,
    sums,
    weights,
    sinks,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, places = tl.arange(0, PADDED_DIM), tl.arange(0, PARTS)
    is_dim = dims < HEAD_DIM
    most = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    if HAS_SINKS:
        most, total = tl.load(sinks + head) * SCORE_UNIT, total + 1.0
    result = tl.zeros((PADDED_DIM,), tl.float32)
    last = tl.load(row_parts + row + 1)
    for first in range(tl.load(row_parts + row), last, PARTS):
        is_part = first + places < last
        heads = (first + places).to(tl.int64) * HEADS + head
        own_most = tl.load(weights + heads * 2, mask=is_part, other=-float("inf"))
        own_total = tl.load(weights + heads * 2 + 1, mask=is_part, other=0.0)
        where = heads[:, None] * HEAD_DIM + dims[None, :]
        part_sums = tl.load(sums + where, mask=is_part[:, None] & is_dim[None, :], other=0.0)
        higher = tl.maximum(most, tl.max(own_most, axis=0))
        before = tl.where(most == -float("inf"), 0.0, tl.exp2(most - higher))
        # A part without a number (NaN in its keys) has no maximum; its sum is none either, and stays none times 0.
        share = tl.where(own_most == -float("inf"), 0.0, tl.exp2(own_most - higher))
        total = total * before + tl.sum(own_total * share, axis=0)
        result = result * before + tl.sum(part_sums * share[:, None], axis=0)
        most = higher
    where = row * out_stride + head * OUT_WIDTH + (OUT_WIDTH - HEAD_DIM) + dims
    tl.store(out + where, (result / total).to(out.dtype.element_ty), mask=is_dim)
