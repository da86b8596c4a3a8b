"""Copies of listed blocks to and from contiguous rows."""

import torch
from torch import Tensor

from kernels.gpu_dispatch import fused_kernels, on_device


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


def _words(rows: Tensor) -> Tensor:
    """View rows as 8-byte words."""
    return rows.view(torch.int64)
