"""Blocks of 8 bits on a GPU (`kernels.int8_blocks`): gathered and rounded, read and scattered, in one pass each."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching import padded
from kernels.int8_blocks import LARGEST, LEVELS, RANGE_BYTES, SMALLEST, parts_of

_CHANNELS = 128  # of one program
_LEVELS, _SMALLEST, _LARGEST = tl.constexpr(LEVELS), tl.constexpr(SMALLEST), tl.constexpr(LARGEST)


def quantise_blocks(blocks: Tensor, block_ids: Tensor, rows: Tensor) -> None:
    """See kernels.int8_blocks."""
    _launch(_quantise, blocks, block_ids, rows)


def dequantise_blocks(rows: Tensor, blocks: Tensor, block_ids: Tensor) -> None:
    """See kernels.int8_blocks."""
    _launch(_dequantise, blocks, block_ids, rows)


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch each kernel on 16 runs of 16 channels, as Triton compiles separately for sizes divisible by 16."""
    blocks = torch.zeros((1, 16, 16, 16), dtype=dtype, device=device)
    rows = torch.zeros((1, (16 + RANGE_BYTES) * 256), dtype=torch.uint8, device=device)
    block_ids = torch.zeros(1, dtype=torch.int64, device=device)
    quantise_blocks(blocks, block_ids, rows)
    dequantise_blocks(rows, blocks, block_ids)


def _launch(kernel: Any, blocks: Tensor, block_ids: Tensor, rows: Tensor) -> None:
    count, (_, runs, block_size, width) = len(rows), blocks.shape
    assert block_ids.shape == (count,), "one block per row"
    if not count:
        return
    rounded, ranges = parts_of(rows, blocks)
    kernel[(count * runs, triton.cdiv(width, _CHANNELS))](
        blocks,
        block_ids,
        rounded,
        ranges,
        runs,
        width,
        rounded.stride(0),
        ranges.stride(0),
        SLOTS=block_size,
        PADDED=padded(block_size),
        CHANNELS=_CHANNELS,
    )


@triton.jit
def _places(
    block_ids,
    runs,
    width,
    row_bytes,
    row_halves,
    SLOTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Return this program's channels, offsets in blocks, rounded rows and ranges, and a mask."""
    listed, run = tl.program_id(0).to(tl.int64) // runs, tl.program_id(0) % runs
    channels, slots = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, PADDED)
    is_there = (slots < SLOTS)[:, None] & (channels < width)[None, :]
    within = run * SLOTS * width + slots[:, None] * width + channels[None, :]
    in_blocks = tl.load(block_ids + listed) * runs * SLOTS * width + within
    return channels, in_blocks, listed * row_bytes + within, listed * row_halves + run * 2 * width + channels, is_there


@triton.jit
def _quantise(
    blocks,
    block_ids,
    rounded,
    ranges,
    runs,
    width,
    row_bytes,
    row_halves,
    SLOTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    channels, in_blocks, in_rounded, in_ranges, is_there = _places(
        block_ids, runs, width, row_bytes, row_halves, SLOTS, PADDED, CHANNELS
    )
    x = tl.load(blocks + in_blocks, mask=is_there, other=0.0).to(tl.float32)
    is_channel = channels < width
    # A channel with a NaN has no range: minimum and maximum alone would skip it.
    is_number = tl.min((x == x).to(tl.int32), axis=0) == 1
    lowest = tl.min(tl.where(is_there, x, float("inf")), axis=0)
    highest = tl.max(tl.where(is_there, x, -float("inf")), axis=0)
    lowest = tl.where(is_channel, tl.where(is_number, lowest, float("nan")), 0.0)
    highest = tl.where(is_channel, highest, 0.0)
    # In the stored precision, so that rounding the ranges adds no error.
    step = tl.minimum(tl.maximum((highest - lowest) / _LEVELS, _SMALLEST), _LARGEST).to(tl.float16)
    lowest = tl.where(lowest == lowest, tl.minimum(tl.maximum(lowest, -_LARGEST), _LARGEST), lowest).to(tl.float16)
    x = (x - lowest.to(tl.float32)[None, :]) / step.to(tl.float32)[None, :]
    # Rounds half to even by adding and subtracting 1.5 * 2^23.
    nearest = (tl.minimum(tl.maximum(x, 0.0), _LEVELS) + 12582912.0) - 12582912.0
    nearest = tl.where(is_there & (nearest == nearest), nearest, 0.0)
    tl.store(rounded + in_rounded, nearest.to(tl.uint8), mask=is_there)
    tl.store(ranges + in_ranges, step, mask=is_channel)
    tl.store(ranges + in_ranges + width, lowest, mask=is_channel)


@triton.jit
def _dequantise(
    blocks,
    block_ids,
    rounded,
    ranges,
    runs,
    width,
    row_bytes,
    row_halves,
    SLOTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    channels, in_blocks, in_rounded, in_ranges, is_there = _places(
        block_ids, runs, width, row_bytes, row_halves, SLOTS, PADDED, CHANNELS
    )
    is_channel = channels < width
    step = tl.load(ranges + in_ranges, mask=is_channel, other=0.0).to(tl.float32)
    lowest = tl.load(ranges + in_ranges + width, mask=is_channel, other=0.0).to(tl.float32)
    x = tl.load(rounded + in_rounded, mask=is_there, other=0).to(tl.float32) * step[None, :] + lowest[None, :]
    tl.store(blocks + in_blocks, x.to(blocks.dtype.element_ty), mask=is_there)
