"""Addresses of a layer's keys and values within blocks."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class BlockView(NamedTuple):
    """Keys and values of one layer within blocks [num_blocks, num_layers, parts, block_size, kv_heads, head_dim], or,
    of FP8 (`kernels.cache_rows`), uint8 [.., block_size, slot_width]. Values of one part are the keys."""

    blocks: Tensor
    layer: int

    @property
    def offsets(self) -> tuple[int, int, int]:
        """Return, in elements: block stride, start of the layer's keys and start of its values within a block."""
        parts, run = self.blocks.shape[2], self.blocks.shape[3] * self.slot_width
        keys_at = parts * self.layer * run
        return self.blocks.stride(0), keys_at, keys_at + (parts - 1) * run

    @property
    def slot_width(self) -> int:
        """Return the elements of a token's keys, or values."""
        return math.prod(self.blocks.shape[4:])

    @property
    def has_scales(self) -> bool:
        """Return whether elements are FP8, with a scale for each head of a slot."""
        return self.blocks.dtype == torch.uint8


class BlockTables(NamedTuple):
    """The blocks of some contexts, on the device."""

    entries: Tensor  # int32, the block tables one after another
    starts: Tensor  # [contexts] int32, where each begins
    is_reversed: Tensor  # [contexts] int8: 1 where slots of a block are taken from its end (the direction table)


@triton.jit
def cached_elements(
    table,
    tokens,
    is_read,
    backwards,
    head,
    block_stride,
    SLOT_WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Return the offset of each token's head within the keys, or the values, of a layer.

    `table`: the context's entries of a BlockTables; `backwards`: its is_reversed."""
    block = tl.load(table + tokens // BLOCK_SIZE, mask=is_read, other=0)
    slot = tokens % BLOCK_SIZE
    slot = tl.where(backwards > 0, BLOCK_SIZE - 1 - slot, slot)
    return block.to(tl.int64) * block_stride + slot * SLOT_WIDTH + head * HEAD_DIM


@triton.jit
def widened(elements, query, HAS_SCALES: tl.constexpr, CONVERTS_FLOAT8: tl.constexpr):
    """Return elements of blocks as numbers of the query's dtype, without their scales. `CONVERTS_FLOAT8`: by the GPU's
    own instructions, two elements each (`launching.converts_float8`)."""
    if HAS_SCALES:
        if CONVERTS_FLOAT8:
            return elements.to(tl.float8e4nv, bitcast=True).to(query.dtype)
        return float8_values(elements, query)
    return elements.to(query.dtype)


@triton.jit
def cached_scales(blocks, elements, is_read, head, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return each token's scale of a head. `blocks`: the keys, or the values, of a layer; `elements`: of
    cached_elements."""
    where = elements + (KV_HEADS - head) * HEAD_DIM + head * 4
    scales = (blocks + where).to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(scales, mask=is_read, other=0.0)


@triton.jit
def float8_values(stored, like):
    """Return bytes of FP8 as numbers of the dtype of `like`, exactly; NaN becomes 480.

    Sign, exponent and mantissa are those of a float16 whose exponent counts from 2**-8 of theirs.

    By integer operations, which every GPU has: below compute capability 8.9 none converts them itself."""
    bits = stored.to(tl.uint16)
    halves = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return halves.to(tl.float32).to(like.dtype)


@triton.jit
def float8_bytes(x):
    """Return float32 numbers as bytes of FP8 (e4m3), to nearest, ties to even, beyond the largest one as that."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 128
    magnitude = tl.where(tl.abs(x) <= 448.0, tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 in steps of 2 ** -9; rounded by adding and subtracting 1.5 * 2 ** 23.
    subnormal = ((magnitude * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (tl.where(x == x, code, 127) | sign).to(tl.uint8)
