"""Addresses of a layer's keys and values within blocks."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class BlockView(NamedTuple):
    """Keys and values of one layer within blocks [num_blocks, num_layers, 2, block_size, kv_heads, head_dim]."""

    blocks: Tensor
    layer: int

    @property
    def offsets(self) -> tuple[int, int, int]:
        """Return, in elements: block stride, start of the layer's keys and start of its values within a block."""
        _, num_layers, _, block_size, kv_heads, head_dim = self.blocks.shape
        run = block_size * kv_heads * head_dim
        return 2 * num_layers * run, 2 * self.layer * run, (2 * self.layer + 1) * run


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
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Return the offset of each token's head within the keys, or the values, of a layer.

    `table`: the context's entries of a BlockTables; `backwards`: its is_reversed.
    """
    block = tl.load(table + tokens // BLOCK_SIZE, mask=is_read, other=0)
    slot = tokens % BLOCK_SIZE
    slot = tl.where(backwards > 0, BLOCK_SIZE - 1 - slot, slot)
    return block.to(tl.int64) * block_stride + (slot * KV_HEADS + head) * HEAD_DIM
