"""Copies of listed blocks to and from contiguous rows, and from one memory to another.

Blocks of 8 bits are for the way to host memory and back (ALISE, section 3.2, equation 8: compression of swapped
caches). Channel-wise: keys and values have one range per layer, head and dimension of a block, over its token slots,
as outliers sit in few channels. x becomes round((x - lowest) / step), step = (highest - lowest) / 255, both in
float16. A block of 16-bit numbers shrinks to (block_size + 4) / (2 * block_size) of its bytes, ranges included: 0.625
at 16 slots. A copied block is one row of bytes:

    uint8    [runs, block_size, width]    rounded numbers
    float16  [runs, 2, width]             steps, then lowest numbers"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.gpu_dispatch import fused_kernels, on_device

_AT_ONCE_BYTES = 32 << 20  # in memory of plain PyTorch's own


def gather_blocks(blocks: Tensor, block_ids: Tensor, rows: Tensor) -> None:
    """Copy blocks to rows: rows[i] = blocks[block_ids[i]].

    blocks      [num_blocks, block_bytes] uint8, contiguous, block_bytes a multiple of 8
    block_ids   [count] int64, on the same device
    rows        [count, block_bytes] uint8, contiguous, on the same device"""
    kernels = fused_kernels("block_copies", blocks.device, blocks.dtype)
    if kernels is not None:
        with on_device(blocks.device):
            kernels.gather_blocks(blocks, block_ids, rows)
    else:
        torch.index_select(_words(blocks), 0, block_ids, out=_words(rows))


def scatter_blocks(rows: Tensor, blocks: Tensor, block_ids: Tensor) -> None:
    """Copy rows to blocks: blocks[block_ids[i]] = rows[i], under the terms of `gather_blocks`; no block twice."""
    kernels = fused_kernels("block_copies", blocks.device, blocks.dtype)
    if kernels is not None:
        with on_device(blocks.device):
            kernels.scatter_blocks(rows, blocks, block_ids)
    else:
        _words(blocks).index_copy_(0, block_ids, _words(rows))


def copy_listed(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    """Copy blocks to blocks: target[target_ids[i]] = source[source_ids[i]]; no target twice.

    source, target            [num_blocks, block_bytes] uint8, contiguous, block_bytes a multiple of 8; one of them may
                              be another device's memory, mapped for this one
    source_ids, target_ids    [count] int64, on this device"""
    kernels = fused_kernels("block_copies", source.device, source.dtype)
    if kernels is not None:
        with on_device(source.device):
            kernels.copy_listed(source, source_ids, target, target_ids)
        return
    size = max(1, _AT_ONCE_BYTES // source.shape[1])
    for first in range(0, len(source_ids), size):
        part = slice(first, first + size)
        _words(target).index_copy_(0, target_ids[part], _words(source).index_select(0, source_ids[part]))


def _words(rows: Tensor) -> Tensor:
    return rows.view(torch.int64)


RANGE_BYTES = 4  # of a channel: its step and its lowest number
LEVELS = 255.0
_NUMBERS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}
SMALLEST, LARGEST = 2.0**-24, 65504.0  # that float16 has


def quantise_blocks(blocks: Tensor, block_ids: Tensor, rows: Tensor) -> None:
    """Round listed blocks into rows.

    blocks      [num_blocks, runs, block_size, width] float, inside contiguous: runs are keys and values of every layer,
                width is kv_heads * head_dim, block_size is even
    block_ids   [count] int64, on the same device
    rows        [count, (block_size + RANGE_BYTES) * runs * width] uint8, each contiguous, on the same device

    Empty slots count too: fill them first. A NaN makes its whole channel NaN; values beyond float16 are clipped."""
    for part in _parts(len(rows), blocks):
        _quantise(blocks.index_select(0, block_ids[part]).float(), *parts_of(rows[part], blocks))


def dequantise_blocks(rows: Tensor, blocks: Tensor, block_ids: Tensor) -> None:
    """Write rows to listed blocks, under the terms of `quantise_blocks`; no block twice."""
    for part in _parts(len(rows), blocks):
        rounded, ranges = parts_of(rows[part], blocks)
        steps, lowest = ranges.float().unbind(dim=2)
        x = rounded.float() * steps[:, :, None] + lowest[:, :, None]
        blocks.index_copy_(0, block_ids[part], x.to(blocks.dtype))


def parts_of(rows: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded numbers [count, runs, block_size, width] and the ranges [count, runs, 2, width] in copies of
    blocks [num_blocks, runs, block_size, width]."""
    _, runs, block_size, width = blocks.shape
    num_numbers = runs * block_size * width
    assert rows.shape[1] == num_numbers + RANGE_BYTES * runs * width, "rows are of other blocks"
    rounded = rows[:, :num_numbers].view(len(rows), runs, block_size, width)
    return rounded, rows[:, num_numbers:].view(torch.float16).view(len(rows), runs, 2, width)


def _parts(count: int, blocks: Tensor) -> Iterator[slice]:
    step = max(1, _NUMBERS_AT_ONCE[blocks.device.type] // blocks[0].numel())
    return (slice(first, first + step) for first in range(0, count, step))


def _quantise(x: Tensor, rounded: Tensor, ranges: Tensor) -> None:
    lowest, highest = x.amin(dim=-2), x.amax(dim=-2)
    ranges[:, :, 0] = ((highest - lowest) / LEVELS).clamp(SMALLEST, LARGEST)
    ranges[:, :, 1] = lowest.clamp(-LARGEST, LARGEST)
    steps, lowest = ranges.float().unbind(dim=2)  # in the stored precision, so that rounding the ranges adds no error
    scaled = (x - lowest[:, :, None]) / steps[:, :, None]
    rounded.copy_(scaled.nan_to_num_(0.0).round_().clamp_(0.0, LEVELS))
