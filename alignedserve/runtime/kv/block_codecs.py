"""Codecs of blocks: the contiguous rows of bytes in which they leave their device."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.device.dtypes import torch_dtype
from kernels.caches.block_lists import gather_blocks, scatter_blocks
from kernels.caches.int8_blocks import dequantise_blocks, quantise_blocks


class BlockCodec(NamedTuple):
    """Encodes each block as a row, uint8 [row_bytes], and decodes rows.

    Lists of blocks are int64 [count], rows uint8 [count, row_bytes], contiguous, both on the blocks' device; a list to
    scatter to has no block twice.
    """

    row_bytes: int
    gather: Callable[[Tensor, Tensor], None]  # (blocks, rows): write the rows
    scatter: Callable[[Tensor, Tensor], None]  # (rows, blocks): overwrite the blocks
    exact_of: Tensor | None = None  # uint8 [num_blocks, row_bytes]: these very bytes


def exact_codec(block_bytes: Tensor) -> BlockCodec:
    """Build a codec that copies byte for byte. `block_bytes`: uint8 [num_blocks, any multiple of 8]."""
    return BlockCodec(
        block_bytes.shape[1],
        partial(gather_blocks, block_bytes),
        lambda rows, block_ids: scatter_blocks(rows, block_bytes, block_ids),
        block_bytes,
    )


def int8_codec(block_bytes: Tensor, layout: BlockLayout) -> BlockCodec:
    """Build a codec that rounds to 8 bits per channel (ALISE, section 3.2). `block_bytes`: blocks of this layout."""
    numbers, parts, first, first_byte = block_bytes.view(torch_dtype(layout.dtype)), [], 0, 0
    for kind in layout.kinds:
        shape, end = (kind.runs_per_block, kind.block_size, kind.kv_width), first_byte + kind.int8_block_bytes
        runs = numbers[:, first : first + kind.block_elements].view(-1, *shape)
        parts.append((runs, slice(first_byte, end)))
        first, first_byte = first + kind.block_elements, end

    def gather(block_ids: Tensor, rows: Tensor) -> None:
        for runs, own in parts:
            quantise_blocks(runs, block_ids, rows[:, own])

    def scatter(rows: Tensor, block_ids: Tensor) -> None:
        for runs, own in parts:
            dequantise_blocks(rows[:, own], runs, block_ids)

    return BlockCodec(layout.int8_block_bytes, gather, scatter)
