"""The keys and values of layers of one kind in the blocks of a storage: of those whose heads have the same sizes."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout


class CachedLayers(Protocol):
    """Holds what attention reads: a storage whose layers are all alike, or one kind of several."""

    layout: BlockLayout
    device: torch.device

    @property
    def blocks(self) -> Tensor:
        """All blocks [num_blocks, num_layers, num_parts, block_size, num_kv_heads, head_dim]; see BlockStorage."""

    @property
    def run_stride(self) -> int:
        """Distance of the runs of consecutive blocks: block b's run is row b * run_stride of `key_runs(layer)`."""

    def key_runs(self, layer: int) -> Tensor:
        """Return rows [.., run_elements], first block 0's keys of this layer."""

    def value_runs(self, layer: int) -> Tensor:
        """Return rows as `key_runs` does, for values."""


class LayerKind:
    """Layers of one kind, numbered among themselves. Views of a storage's blocks, which it owns. A slot has a number: b
    * block_size + i, slot i of block b."""

    run_stride = 1  # runs are as far apart as blocks

    def __init__(self, layout: BlockLayout, blocks: Tensor, first: int) -> None:
        """`layout`: of these layers alone. `blocks` [num_blocks, elements], `first`: the layers' first element."""
        self.layout, self.device = layout, blocks.device
        self._elements = blocks[:, first : first + layout.kv_elements]
        # All token slots [num_blocks, kv_runs, block_size, slot_width].
        self.slots = self._elements.view(len(blocks), layout.kv_runs, layout.block_size, layout.slot_width)
        # From a block's slot to the same of the next, where that is a whole number of slots.
        self._slot_stride, rest = divmod(blocks.stride(0), layout.slot_width)
        # Rows [.., slot_width] from block 0's first slot of every run on; empty where that is none.
        self._rows: list[Tensor] = []
        if not rest and blocks.is_contiguous():
            starts = range(first, first + layout.kv_elements, layout.run_elements)
            self._rows = [_rows(blocks.view(-1)[start:], layout.slot_width) for start in starts]

    @property
    def blocks(self) -> Tensor:
        layout = self.layout
        slot = (layout.slot_width,) if layout.has_scales else (layout.num_kv_heads, layout.head_dim)
        return self._elements.view(len(self._elements), layout.num_layers, layout.num_parts, layout.block_size, *slot)

    def key_runs(self, layer: int) -> Tensor:
        return self.slots[:, layer * self.layout.num_parts].flatten(1)

    def value_runs(self, layer: int) -> Tensor:
        return self.slots[:, (layer + 1) * self.layout.num_parts - 1].flatten(1)

    def rows(self, numbers: Tensor) -> Tensor:
        if not self._rows:
            return numbers
        size = self.layout.block_size
        return numbers + numbers.div(size, rounding_mode="floor") * (self._slot_stride - size)

    def write(self, layer: int, rows: Tensor, write_rows: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        """Let `write_rows` write keys and values of one layer; `rows`: of their slots. write_rows (rows, keys, values):
        writes those rows of keys and values [.., slot_width], both contiguous"""
        parts = (layer * self.layout.num_parts, (layer + 1) * self.layout.num_parts - 1)
        if self._rows:
            write_rows(rows, *(self._rows[part] for part in parts))
            return
        shape = (len(rows), self.layout.slot_width)
        written = [torch.empty(shape, dtype=self.slots.dtype, device=self.device) for _ in parts]
        write_rows(torch.arange(len(rows), device=self.device), *written)
        blocks, offsets = rows.div(self.layout.block_size, rounding_mode="floor"), rows % self.layout.block_size
        for part, tensor in zip(parts, written, strict=True):
            self.slots[blocks, part, offsets] = tensor


def _rows(flat: Tensor, width: int) -> Tensor:
    return flat[: len(flat) // width * width].view(-1, width)
