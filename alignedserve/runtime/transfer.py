"""Moving blocks between a worker's storage and the pool's arena: the KVTransfer port and its shared-memory form.

Every run of neighbouring blocks carries an XXH3 checksum, seeded with the run's place in the request so that runs
cannot change places. A receiver checks bounds, lengths, generation and checksum, and fails closed: a handoff that does
not hold raises HandoffRejected and becomes a recompute, never a token.

A worker that was stopped while it wrote may go on after its lease was taken back, into blocks that are somebody
else's by then. So what is summed is never read from the arena before it can no longer matter: the sender sums what it
is about to write, the receiver sums the arena after its copy (such a writer never writes the right bytes back).
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from alignedserve.core.blocks import blocks_for
from alignedserve.core.errors import HandoffRejected
from alignedserve.core.ids import BlockId
from alignedserve.messages.links import BlockRun, Handoff
from alignedserve.runtime.arena import NOBODYS, Arena
from alignedserve.runtime.block_storage import BlockStorage


class KVTransfer(Protocol):
    """Copies whole blocks. Blocking; called from a worker's engine or transfer thread."""

    def offload(
        self, storage_block_ids: Sequence[BlockId], arena_block_ids: Sequence[BlockId], generation: int
    ) -> tuple[BlockRun, ...]:
        """Copy out, in order, and return the runs with their checksums. Raises HandoffRejected on a stale lease."""

    def fetch(self, handoff: Handoff, storage_block_ids: Sequence[BlockId]) -> None:
        """Copy in, in order, and verify. Raises HandoffRejected; the storage blocks are then undefined."""


class ShmTransfer:
    """KVTransfer over an arena mapped into this process."""

    def __init__(self, storage: BlockStorage, arena: Arena) -> None:
        self._storage = storage
        self._arena = arena

    def offload(
        self, storage_block_ids: Sequence[BlockId], arena_block_ids: Sequence[BlockId], generation: int
    ) -> tuple[BlockRun, ...]:
        """See KVTransfer."""
        if len(storage_block_ids) != len(arena_block_ids):
            raise HandoffRejected("the lease has another number of blocks than the request")
        self._check_bounds(arena_block_ids)
        self._check_generation(arena_block_ids, generation)
        runs = []
        copied = 0
        for first, count in neighbours(arena_block_ids):
            rows = np.empty((count, self._storage.layout.block_bytes), np.uint8)
            self._storage.read_blocks(storage_block_ids[copied : copied + count], rows)
            runs.append(BlockRun(first, count, _checksum(rows, copied)))
            self._arena.blocks[first : first + count] = rows
            copied += count
        return tuple(runs)

    def fetch(self, handoff: Handoff, storage_block_ids: Sequence[BlockId]) -> None:
        """See KVTransfer."""
        num_blocks = sum(run.num_blocks for run in handoff.runs)
        if any(run.num_blocks < 1 for run in handoff.runs):
            raise HandoffRejected("the handoff has a run without blocks")
        if num_blocks != blocks_for(handoff.context_len, self._storage.layout.block_size):
            raise HandoffRejected("the handoff's blocks do not match its context length")
        if num_blocks > len(storage_block_ids):
            raise HandoffRejected("the handoff has more blocks than were set aside for it")
        arena_block_ids = [BlockId(run.first_block + i) for run in handoff.runs for i in range(run.num_blocks)]
        self._check_bounds(arena_block_ids)
        self._check_generation(arena_block_ids, handoff.generation)
        copied = 0
        for run in handoff.runs:
            source = self._arena.blocks[run.first_block : run.first_block + run.num_blocks]
            self._storage.write_blocks(storage_block_ids[copied : copied + run.num_blocks], source)
            if _checksum(source, copied) != run.checksum:
                raise HandoffRejected("a checksum does not hold")
            copied += run.num_blocks
        # The lease may have been taken back while we copied: what we have is then nobody's data.
        self._check_generation(arena_block_ids, handoff.generation)

    def _check_bounds(self, arena_block_ids: Sequence[BlockId]) -> None:
        if any(not 0 <= block_id < self._arena.num_blocks for block_id in arena_block_ids):
            raise HandoffRejected("a block outside the arena")

    def _check_generation(self, arena_block_ids: Sequence[BlockId], generation: int) -> None:
        stamped = self._arena.generations[list(arena_block_ids)]
        if generation == NOBODYS or not bool((stamped == generation).all()):
            raise HandoffRejected("the lease is no longer valid")


def _checksum(rows: npt.NDArray[np.uint8], num_before: int) -> int:
    """Of a run of blocks that comes after `num_before` others of its request."""
    return int(xxhash.xxh3_64_intdigest(rows.data, num_before))


def neighbours(block_ids: Iterable[BlockId]) -> list[tuple[int, int]]:
    """Cut a list of blocks into (first block, count) runs of consecutive ids, in order."""
    runs: list[tuple[int, int]] = []
    for block_id in block_ids:
        if runs and sum(runs[-1]) == block_id:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block_id, 1))
    return runs
