"""Copies of listed blocks on a GPU: to and from contiguous memory, so that few large copies cross a link, or from
memory to memory, of which one may be another GPU's."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching import parts_of

_WORDS = 1024  # of 8 bytes that a program copies at a time
# Of a copy between two GPUs. A megabyte or two under way fills a link of 450 GB/s, and more would keep multiprocessors
# from what is computed meanwhile.
_PEER_PROGRAMS = 256


def gather_blocks(blocks: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    assert staging.shape == (len(block_ids), blocks.shape[1]), "a row of the staging for each block"
    _copy(blocks, block_ids, staging, None)


def scatter_blocks(staging: Tensor, blocks: Tensor, block_ids: Tensor) -> None:
    assert staging.shape == (len(block_ids), blocks.shape[1]), "a row of the staging for each block"
    _copy(staging, None, blocks, block_ids)


def copy_listed(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    assert source.shape[1] == target.shape[1], "blocks of one size"
    assert len(source_ids) == len(target_ids), "as many targets as sources"
    _copy(source, source_ids, target, target_ids, most_programs=_PEER_PROGRAMS)


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch each kernel on 16 words, as Triton compiles separately for sizes divisible by 16. Raises its errors."""
    blocks, rows = (torch.zeros((1, 128), dtype=dtype, device=device) for _ in range(2))
    block_ids = torch.zeros(1, dtype=torch.int64, device=device)
    gather_blocks(blocks, block_ids, rows)
    scatter_blocks(rows, blocks, block_ids)
    copy_listed(rows, block_ids, blocks, block_ids)


def _copy(
    source: Tensor, source_ids: Tensor | None, target: Tensor, target_ids: Tensor | None, most_programs: int = 1 << 30
) -> None:
    listed = source_ids if source_ids is not None else target_ids
    assert listed is not None, "blocks are listed on one side"
    assert source.shape[1] % 8 == 0, "blocks are whole words of 8 bytes"
    count, num_words = len(listed), source.shape[1] // 8
    if not count:
        return
    per_block = parts_of(num_words, _WORDS)
    _copy_words[(min(count * per_block, most_programs),)](
        source.view(torch.int64),
        source_ids if source_ids is not None else listed,
        target.view(torch.int64),
        target_ids if target_ids is not None else listed,
        count * per_block,
        per_block,
        num_words,
        READS_LISTED=source_ids is not None,
        WRITES_LISTED=target_ids is not None,
        WORDS=_WORDS,
    )


@triton.jit
def _copy_words(
    source,
    source_ids,
    target,
    target_ids,
    num_parts,
    parts_per_block,
    num_words,
    READS_LISTED: tl.constexpr,
    WRITES_LISTED: tl.constexpr,
    WORDS: tl.constexpr,
):
    for part in range(tl.program_id(0), num_parts, tl.num_programs(0)):
        row = (part // parts_per_block).to(tl.int64)
        words = part % parts_per_block * WORDS + tl.arange(0, WORDS)
        is_word = words < num_words
        read, written = row, row
        if READS_LISTED:
            read = tl.load(source_ids + row)
        if WRITES_LISTED:
            written = tl.load(target_ids + row)
        content = tl.load(source + read * num_words + words, mask=is_word)
        tl.store(target + written * num_words + words, content, mask=is_word)
