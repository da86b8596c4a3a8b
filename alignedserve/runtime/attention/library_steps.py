"""Chunks of one step by a library's kernels, in the place of ours."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from alignedserve.runtime.attention.backend import Contexts
from alignedserve.runtime.attention.libraries import PagedChunks, Pages, WholePrompts
from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.device.arrays import Array
from alignedserve.runtime.kv.block_storage import BlockStorage


class LibraryPrompts:
    """Prompts from their first token on, which read only the keys and values that the layer has just computed."""

    def __init__(self, kernel: WholePrompts, counts: IntArray, window: int | None) -> None:
        self.host_arrays: list[Array] = [_starts(counts)]
        self._kernel = kernel
        self._window = window
        self._longest = int(counts.max())
        self._starts: Tensor | None = None

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """See StepAttention."""
        (self._starts,) = tensors

    def run(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        """Fill `out`, as StepAttention.chunks does."""
        assert self._starts is not None, "a layer is computed before its arrays are bound"
        tokens, kv_heads, group, head_dim = queries.shape
        keys, values = (part.view(tokens, kv_heads, head_dim) for part in new)
        flat = queries.reshape(tokens, kv_heads * group, head_dim)
        window = self._window if is_windowed else None
        out.copy_(self._kernel(flat, keys, values, self._starts, self._longest, window).view(out.shape))


class LibraryChunks:
    """Chunks over contexts in blocks, whose slots are filled from the front."""

    def __init__(
        self,
        kernel: PagedChunks,
        storage: BlockStorage,
        contexts: tuple[Contexts, IntArray, IntArray],
        window: int | None,
    ) -> None:
        """`contexts`: the table, its rows that compute a chunk, and the tokens of each chunk."""
        table, rows, counts = contexts
        lengths = table.num_computed[rows] + counts
        width = -(-int(lengths.max()) // table.block_size)
        pages = table.block_tables[rows, :width].astype(np.int32)
        self.host_arrays: list[Array] = [_starts(counts), lengths.astype(np.int32), pages]
        self._kernel = kernel
        self._storage = storage
        self._window = window
        self._longest = (int(counts.max()), int(lengths.max()))
        self._pages: Pages | None = None

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """See StepAttention."""
        starts, lengths, table = tensors
        self._pages = Pages(starts, lengths, table, *self._longest)

    def run(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        """Fill `out`, as StepAttention.chunks does."""
        assert self._pages is not None, "a layer is computed before its arrays are bound"
        tokens, kv_heads, group, head_dim = queries.shape
        blocks = self._storage.blocks[:, layer]
        flat = queries.reshape(tokens, kv_heads * group, head_dim)
        window = self._window if is_windowed else None
        out.copy_(self._kernel(flat, blocks[:, 0], blocks[:, 1], self._pages, window).view(out.shape))


def _starts(counts: IntArray) -> Array:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
