"""Where keys and values of a layer lie within blocks."""

from typing import NamedTuple

from torch import Tensor


class BlockView(NamedTuple):
    """Keys and values of one layer within blocks [num_blocks, num_layers, 2, block_size, kv_heads, head_dim]."""

    blocks: Tensor
    layer: int

    @property
    def offsets(self) -> tuple[int, int, int]:
        """In elements: from a block to the next, of the layer's keys and of its values within a block."""
        _, num_layers, _, block_size, kv_heads, head_dim = self.blocks.shape
        run = block_size * kv_heads * head_dim
        return 2 * num_layers * run, 2 * self.layer * run, (2 * self.layer + 1) * run
