"""Copies of listed blocks to and from contiguous rows, and from one memory to another."""

import torch
from torch import Tensor

from kernels.gpu_dispatch import fused_kernels, on_device

_AT_ONCE_BYTES = 32 << 20  # in memory of plain PyTorch's own


def gather_blocks(blocks: Tensor, block_ids: Tensor, rows: Tensor) -> None:
    """Copy blocks to rows: rows[i] = blocks[block_ids[i]].

    blocks      [num_blocks, block_bytes] uint8, contiguous, block_bytes a multiple of 8
    block_ids   [count] int64, on the same device
    rows        [count, block_bytes] uint8, contiguous, on the same device
    """
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
    source_ids, target_ids    [count] int64, on this device
    """
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
