"""Copies of listed blocks to and from contiguous memory on a GPU, so that few large copies cross a link."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 1024  # of 8 bytes that one program copies


def gather_blocks(blocks: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """See kernels.block_lists."""
    _copy(blocks, block_ids, staging, is_gather=True)


def scatter_blocks(staging: Tensor, blocks: Tensor, block_ids: Tensor) -> None:
    """See kernels.block_lists."""
    _copy(blocks, block_ids, staging, is_gather=False)


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch each kernel on 16 words, as Triton compiles separately for sizes divisible by 16. Raises its errors."""
    blocks, rows = (torch.zeros((1, 128), dtype=dtype, device=device) for _ in range(2))
    block_ids = torch.zeros(1, dtype=torch.int64, device=device)
    gather_blocks(blocks, block_ids, rows)
    scatter_blocks(rows, blocks, block_ids)


def _copy(blocks: Tensor, block_ids: Tensor, staging: Tensor, *, is_gather: bool) -> None:
    count, block_bytes = staging.shape
    assert block_bytes % 8 == 0, "blocks are whole words of 8 bytes"
    assert blocks.shape[1] == block_bytes, "staging is of other blocks"
    assert block_ids.shape == (count,), "one block per row of the staging"
    if not count:
        return
    num_words = block_bytes // 8
    _copy_words[(count, triton.cdiv(num_words, _WORDS))](
        blocks.view(torch.int64), block_ids, staging.view(torch.int64), num_words, IS_GATHER=is_gather, WORDS=_WORDS
    )


@triton.jit
def _copy_words(blocks, block_ids, staging, num_words, IS_GATHER: tl.constexpr, WORDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    is_word = words < num_words
    in_blocks = blocks + tl.load(block_ids + row) * num_words + words
    in_staging = staging + row * num_words + words
    if IS_GATHER:
        tl.store(in_staging, tl.load(in_blocks, mask=is_word), mask=is_word)
    else:
        tl.store(in_blocks, tl.load(in_staging, mask=is_word), mask=is_word)
