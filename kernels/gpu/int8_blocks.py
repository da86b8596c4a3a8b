"""Blocks of 8 bits for the way to the pool and back (ALISE, section 3.2, equation 8: compression of swapped caches).

Channel-wise: keys and values have one range per layer, head and dimension of a block, over its token slots, as outliers
sit in few channels. x is kept as round((x - lowest) / step), step = (highest - lowest) / 255. A block of bfloat16
shrinks to (block_size + 8) / (2 * block_size) of its bytes, ranges in float32 included: 0.75 at 16 slots.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching import padded

_CHANNELS = 128  # of one program
_LEVELS = 255.0
_SMALLEST_STEP = 1e-12  # of a channel of equal numbers


def quantise_blocks(blocks: Tensor, block_ids: Tensor, rounded: Tensor, ranges: Tensor) -> None:
    """Round listed blocks on their way out.

    blocks      [num_blocks, runs, block_size, width] float, contiguous: runs are keys and values of every layer,
                width is kv_heads * head_dim
    block_ids   [count] int64
    rounded     [count, runs, block_size, width] uint8, contiguous
    ranges      [count, runs, 2, width] float32, contiguous: steps, then lowest numbers

    Slots that hold no token count as they are: clear them first.
    """
    _launch(_quantise, blocks, block_ids, rounded, ranges)


def dequantise_blocks(rounded: Tensor, ranges: Tensor, blocks: Tensor, block_ids: Tensor) -> None:
    """Write listed blocks on their way in; as `quantise_blocks`, and no block twice."""
    _launch(_dequantise, blocks, block_ids, rounded, ranges)


def _launch(kernel: Any, blocks: Tensor, block_ids: Tensor, rounded: Tensor, ranges: Tensor) -> None:
    count, runs, block_size, width = rounded.shape
    if count:
        kernel[(count * runs, triton.cdiv(width, _CHANNELS))](
            blocks,
            block_ids,
            rounded,
            ranges,
            runs,
            width,
            SLOTS=block_size,
            PADDED=padded(block_size),
            CHANNELS=_CHANNELS,
        )


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """The plain reference. x [..., block_size, width] -> uint8 of the same shape, ranges [..., 2, width] float32."""
    lowest = x.float().amin(dim=-2)
    steps = ((x.float().amax(dim=-2) - lowest) / _LEVELS).clamp(min=_SMALLEST_STEP)
    rounded = torch.round((x.float() - lowest[..., None, :]) / steps[..., None, :])
    return rounded.to(torch.uint8), torch.stack((steps, lowest), dim=-2)


@triton.jit
def _places(block_ids, runs, width, SLOTS: tl.constexpr, PADDED: tl.constexpr, CHANNELS: tl.constexpr):
    """Of this program: its run among the listed ones, elements in the blocks, elements in the rounded, and a mask."""
    run = tl.program_id(0).to(tl.int64)
    channels, slots = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, PADDED)
    is_there = (slots < SLOTS)[:, None] & (channels < width)[None, :]
    within = slots[:, None] * width + channels[None, :]
    in_blocks = (tl.load(block_ids + run // runs) * runs + run % runs) * SLOTS * width + within
    return run, channels, in_blocks, run * SLOTS * width + within, is_there


@triton.jit
def _quantise(
    blocks, block_ids, rounded, ranges, runs, width, SLOTS: tl.constexpr, PADDED: tl.constexpr, CHANNELS: tl.constexpr
):
    run, channels, in_blocks, in_rounded, is_there = _places(block_ids, runs, width, SLOTS, PADDED, CHANNELS)
    x = tl.load(blocks + in_blocks, mask=is_there, other=0.0).to(tl.float32)
    is_channel = channels < width
    lowest = tl.min(tl.where(is_there, x, float("inf")), axis=0)
    highest = tl.max(tl.where(is_there, x, -float("inf")), axis=0)
    lowest, highest = tl.where(is_channel, lowest, 0.0), tl.where(is_channel, highest, 0.0)
    step = tl.maximum((highest - lowest) / 255.0, 1e-12)
    x = (x - lowest[None, :]) / step[None, :]
    # To the nearest, to even between two: what adding and taking away 1.5 * 2^23 leaves.
    nearest = tl.where(is_there, (x + 12582912.0) - 12582912.0, 0.0)
    tl.store(rounded + in_rounded, nearest.to(tl.uint8), mask=is_there)
    tl.store(ranges + run * 2 * width + channels, step, mask=is_channel)
    tl.store(ranges + (run * 2 + 1) * width + channels, lowest, mask=is_channel)


@triton.jit
def _dequantise(
    blocks, block_ids, rounded, ranges, runs, width, SLOTS: tl.constexpr, PADDED: tl.constexpr, CHANNELS: tl.constexpr
):
    run, channels, in_blocks, in_rounded, is_there = _places(block_ids, runs, width, SLOTS, PADDED, CHANNELS)
    is_channel = channels < width
    step = tl.load(ranges + run * 2 * width + channels, mask=is_channel, other=0.0)
    lowest = tl.load(ranges + (run * 2 + 1) * width + channels, mask=is_channel, other=0.0)
    x = tl.load(rounded + in_rounded, mask=is_there, other=0).to(tl.float32) * step[None, :] + lowest[None, :]
    tl.store(blocks + in_blocks, x.to(blocks.dtype.element_ty), mask=is_there)
