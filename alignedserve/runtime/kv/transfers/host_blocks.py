"""Blocks in host memory, gathered into pieces that travel, scattered out of them, and checksummed on the way."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from alignedserve.core.ids import BlockId
from alignedserve.runtime.kv.block_checksums import PlacedRun, RunChecksums, copy_rows
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.block_channel import Rows

Bytes = npt.NDArray[np.uint8]


class RowSource(Protocol):
    """Blocks that can be iterated row by row: a BlockStorage or an Arena."""

    def rows_to_read(self, block_ids: Sequence[BlockId]) -> Iterator[Bytes]:
        """Iterate over their bytes, block by block."""

    def rows_to_write(self, block_ids: Sequence[BlockId]) -> Iterator[Bytes]:
        """Iterate over rows to fill, one per block."""


class HostBlocks:
    """Moves blocks of any RowSource into and out of pieces in host memory."""

    def __init__(self, blocks: RowSource, block_bytes: int) -> None:
        self.device = "cpu"
        self._blocks = blocks
        self._block_bytes = block_bytes

    def checksums(self, runs: Sequence[PlacedRun]) -> RunChecksums:
        """Return checksums to be updated by gather or scatter, over all the blocks in order."""
        return RunChecksums(runs, self._block_bytes)

    def gather(self, block_ids: Sequence[BlockId], rows: Rows, *checksums: RunChecksums) -> None:
        """Copy blocks into rows: uint8 [len(block_ids), block_bytes]."""
        copy_rows(self._blocks.rows_to_read(block_ids), np.asarray(rows), *checksums, from_target=True)

    def scatter(self, block_ids: Sequence[BlockId], rows: Rows, *checksums: RunChecksums) -> None:
        """Copy rows into blocks."""
        copy_rows(np.asarray(rows), self._blocks.rows_to_write(block_ids), *checksums, from_target=False)

    def rows_to_send(self, block_ids: Sequence[BlockId], checksums: RunChecksums) -> Iterator[Bytes]:
        """Iterate over the bytes of blocks, which are checksummed as they leave."""
        for row in self._blocks.rows_to_read(block_ids):
            checksums.update(row)
            yield row

    def rows_to_fill(self, block_ids: Sequence[BlockId], checksums: RunChecksums) -> Iterator[Bytes]:
        """Iterate over rows to fill, which are checksummed when the iterator is advanced, past its end as well."""
        for row in self._blocks.rows_to_write(block_ids):
            yield row
            checksums.update(row)


class ArenaBuffer:
    """A ServedBuffer over an arena, which it does not own."""

    def __init__(self, arena: Arena, *, writer_stamps: bool = True) -> None:
        self.writer_stamps = writer_stamps
        self.layout = arena.layout
        self.num_blocks = arena.num_blocks
        self.device = "cpu"
        self._arena = arena
        self._memory = HostBlocks(arena, arena.layout.block_bytes)
        self.gather = self._memory.gather
        self.scatter = self._memory.scatter

    def stamp(self, block_ids: Sequence[BlockId], generation: int) -> None:
        """See Arena."""
        self._arena.stamp(block_ids, generation)

    def is_stamped(self, block_ids: Sequence[BlockId], generation: int) -> bool:
        """See Arena."""
        return self._arena.is_stamped(block_ids, generation)

    def rows(self, block_ids: Sequence[BlockId]) -> Iterator[Bytes]:
        """See ServedBuffer."""
        return self._arena.rows_to_write(block_ids)

    def exported(self) -> None:
        """Return None: a CUDA device cannot map it."""
