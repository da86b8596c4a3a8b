"""Blocks in host memory, gathered into pieces that travel, scattered out of them, and checksummed on the way."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from alignedserve.runtime.kv.block_checksums import RunChecksums
from alignedserve.runtime.kv.block_runs import BlockIds, PlacedRuns
from alignedserve.runtime.kv.list_copies import copy_from_pieces, copy_to_pieces
from alignedserve.runtime.kv.shm_arena import WHOLE, Arena, ArenaPart
from alignedserve.runtime.kv.transfers.block_server import Rows
from kernels.cpu.block_copies import BlockList, all_rows, digest_blocks

# Summed at a time, beside what travels: so little that it is still in the core's own cache when it is sent.
_SUMMED_BYTES = 512 * 1024


class BlockSource(Protocol):
    """Blocks that are read and written in pieces on the host: a BlockStorage or an Arena."""

    def pieces_to_read(self, block_ids: BlockIds) -> Iterator[BlockList]:
        """Iterate over lists of blocks that hold these, in order; one is valid until the iterator is advanced."""

    def pieces_to_write(self, block_ids: BlockIds) -> Iterator[BlockList]:
        """Iterate over lists of blocks to fill, taken over when the iterator is advanced, past its end as well."""


class HostBlocks:
    """Moves blocks of any BlockSource into and out of pieces in host memory."""

    def __init__(self, blocks: BlockSource) -> None:
        self._blocks = blocks

    def checksums(self, runs: PlacedRuns) -> RunChecksums:
        return RunChecksums(runs)

    def gather(self, block_ids: BlockIds, rows: Rows, *checksums: RunChecksums) -> None:
        pieces = self._blocks.pieces_to_read(block_ids)
        digests = copy_from_pieces(pieces, all_rows(np.asarray(rows)), is_streamed=False)
        for checksum in checksums:
            checksum.add(digests)

    def scatter(self, block_ids: BlockIds, rows: Rows, *checksums: RunChecksums) -> None:
        digests = copy_to_pieces(all_rows(np.asarray(rows)), self._blocks.pieces_to_write(block_ids))
        for checksum in checksums:
            checksum.add(digests)

    def lists_to_send(self, block_ids: BlockIds, checksums: RunChecksums) -> Iterator[BlockList]:
        for piece in self._blocks.pieces_to_read(block_ids):
            for part in _parts(piece):
                checksums.add(digest_blocks(part))
                yield part

    def lists_to_fill(self, block_ids: BlockIds, checksums: RunChecksums) -> Iterator[BlockList]:
        """Iterate over blocks to fill, which are checksummed when the iterator is advanced, past its end as well."""
        for piece in self._blocks.pieces_to_write(block_ids):
            for part in _parts(piece):
                yield part
                checksums.add(digest_blocks(part))


def _parts(piece: BlockList) -> Iterator[BlockList]:
    size = max(1, _SUMMED_BYTES // piece.block_bytes)
    for first in range(0, len(piece), size):
        yield piece.part(first, first + size)


class ArenaBuffer:
    """A ServedBuffer over an arena of whole blocks, which it does not own."""

    def __init__(self, arena: Arena, *, writer_stamps: bool = True, part: ArenaPart = WHOLE) -> None:
        """`part`: of each block that is served. Raises HandoffRejected if the blocks have no such part."""
        self.writer_stamps = writer_stamps
        self.layout = part.of(arena.layout)
        self.num_blocks = arena.num_blocks
        self._arena = arena
        self._part = part
        self._memory = HostBlocks(self)
        self.gather = self._memory.gather
        self.scatter = self._memory.scatter

    def part_of(self, part: ArenaPart) -> "ArenaBuffer":
        return ArenaBuffer(self._arena, writer_stamps=self.writer_stamps, part=part)

    def begin_thread(self) -> None: ...

    def stamp(self, block_ids: BlockIds, generation: int) -> None:
        self._arena.stamp(block_ids, generation)

    def is_stamped(self, block_ids: BlockIds, generation: int) -> bool:
        return self._arena.is_stamped(block_ids, generation)

    def listed(self, block_ids: BlockIds) -> BlockList:
        return self._arena.listed(block_ids, self._part)

    def pieces_to_read(self, block_ids: BlockIds) -> Iterator[BlockList]:
        return iter((self.listed(block_ids),))

    def pieces_to_write(self, block_ids: BlockIds) -> Iterator[BlockList]:
        return iter((self.listed(block_ids),))

    def exported(self) -> None:
        """Return None: a CUDA device cannot map it."""
