"""The chunks of a step as a library computes them; where it fails there, our own kernel computes that step, too."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.runtime.attention.backend import Contexts
from alignedserve.runtime.attention.libraries import AttentionLibrary, Pages
from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.device.arrays import Array, to_device
from alignedserve.runtime.device.device_work import is_refusal
from alignedserve.runtime.kv.block_storage import BlockStorage

# Bytes of keys and values that are gathered for a layer; and tokens of a chunk below which our kernel, which reads each
# of them once, is faster than a library behind a copy of its context.
_MOST_GATHERED_BYTES = 128 << 20
LEAST_GATHERED_CHUNK = 256

OnFailure = Callable[[AttentionLibrary, Exception], None]


def raise_failure(_library: AttentionLibrary, error: Exception) -> None:
    raise error


class ChunkComputer(Protocol):
    """Several tokens of each of some sequences, on every layer."""

    host_arrays: list[Array]

    def bind(self, tensors: Sequence[Tensor]) -> None: ...

    def run(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        """Fill `out`, as StepAttention.chunks does."""


class _LibraryStep:
    def __init__(
        self, library: AttentionLibrary, window: int | None, own: ChunkComputer, on_failure: OnFailure
    ) -> None:
        self._library = library
        self._window = window
        self._own = own
        self._on_failure = on_failure
        self._has_failed = False

    def run(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        if not self._has_failed:
            try:
                tokens, kv_heads, group, head_dim = queries.shape
                flat = queries.reshape(tokens, kv_heads * group, head_dim)
                result = self._compute(flat, new, layer, self._window if is_windowed else None)
                out.copy_(result.view(out.shape))
                return
            except Exception as error:
                if isinstance(error, torch.AcceleratorError) and not is_refusal(error):
                    raise
                self._has_failed = True
                self._on_failure(self._library, error)
                self._own.bind(to_device(self._own.host_arrays, queries.device))
        self._own.run(queries, new, out, layer, is_windowed)

    def _compute(self, queries: Tensor, new: tuple[Tensor, Tensor], layer: int, window: int | None) -> Tensor:
        raise NotImplementedError


class LibraryPrompts(_LibraryStep):
    """Prompts from their first token on, which read only the keys and values that the layer has just computed."""

    def __init__(
        self, library: AttentionLibrary, counts: IntArray, window: int | None, own: ChunkComputer, on_failure: OnFailure
    ) -> None:
        super().__init__(library, window, own, on_failure)
        self.host_arrays: list[Array] = [_starts(counts)]
        self._longest = int(counts.max())
        self._starts: Tensor | None = None

    def bind(self, tensors: Sequence[Tensor]) -> None:
        (self._starts,) = tensors

    @override
    def _compute(self, queries: Tensor, new: tuple[Tensor, Tensor], layer: int, window: int | None) -> Tensor:
        assert self._starts is not None, "a layer is computed before its arrays are bound"
        keys, values = (part.view(len(part), -1, queries.shape[-1]) for part in new)
        return self._library.whole(queries, keys, values, self._starts, self._longest, window)


class ContextChunks:
    """The contexts of some chunks in blocks, as the table has them now."""

    def __init__(self, table: Contexts, rows: IntArray, counts: IntArray) -> None:
        self.counts = counts
        self.lengths = table.num_computed[rows] + counts
        self._block_size = table.block_size
        self._widths = -(-self.lengths // table.block_size)
        self._tables = table.block_tables[rows, : int(self._widths.max())]

    @property
    def num_slots(self) -> int:
        return int(self._widths.sum()) * self._block_size

    def arrays(self) -> list[Array]:
        is_own = np.arange(self._tables.shape[1]) < self._widths[:, None]
        table = np.where(is_own, self._tables, 0).astype(np.int32)
        blocks = self._tables[is_own].astype(np.int64)
        return [_starts(self.counts), self.lengths.astype(np.int32), table, blocks, self._firsts()]

    def _firsts(self) -> Array:
        return _starts(self._widths * self._block_size)

    def tails(self) -> list[Array]:
        last = self._tables[np.arange(len(self.lengths)), self._widths - 1]
        first = self.lengths - (self._widths - 1) * self._block_size
        is_tail = np.arange(self._block_size) >= first[:, None]
        places, slots = np.nonzero(is_tail)
        return [last[places].astype(np.int64), slots.astype(np.int64)]


class LibraryChunks(_LibraryStep):
    """ChunkComputer over contexts in blocks, whose slots are filled from the front."""

    def __init__(
        self,
        library: AttentionLibrary,
        storage: BlockStorage,
        chunks: ContextChunks,
        window: int | None,
        own: ChunkComputer,
        on_failure: OnFailure,
        *,
        clears_tails: bool,
    ) -> None:
        """`clears_tails`: zeros are written behind the contexts' ends before the library reads their last blocks."""
        super().__init__(library, window, own, on_failure)
        self.host_arrays: list[Array] = [*chunks.arrays(), *(chunks.tails() if clears_tails else ())]
        self._storage = storage
        self._longest = (int(chunks.counts.max()), int(chunks.lengths.max()))
        self._pages: Pages | None = None
        self._tails: list[Tensor] = []

    def bind(self, tensors: Sequence[Tensor]) -> None:
        starts, lengths, table, blocks, firsts, *self._tails = tensors
        self._pages = Pages(starts, lengths, table, *self._longest, blocks, firsts)

    @override
    def _compute(self, queries: Tensor, new: tuple[Tensor, Tensor], layer: int, window: int | None) -> Tensor:
        assert self._pages is not None, "a layer is computed before its arrays are bound"
        if self._tails:  # of all layers at once, before the first
            self._storage.zero_slots(*self._tails)
            self._tails = []
        blocks = self._storage.blocks[:, layer]
        return self._library.paged(queries, blocks[:, 0], blocks[:, 1], self._pages, window)


def is_worth_gathering(chunks: ContextChunks, token_bytes: int) -> bool:
    """Return whether a library that reads no blocks should compute these. `token_bytes`: of keys and values."""
    return chunks.counts.mean() >= LEAST_GATHERED_CHUNK and chunks.num_slots * token_bytes <= _MOST_GATHERED_BYTES


def _starts(counts: IntArray) -> Array:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
