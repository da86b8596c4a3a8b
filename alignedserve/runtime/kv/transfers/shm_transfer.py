"""Moving blocks between a worker's storage and blocks that others see: the KVTransfer port and its shared-memory form.

A receiver checks bounds, lengths, generation and checksums, and fails closed: a handoff that does not hold is a miss
and becomes a recompute, never a token.

A worker that was stopped while it wrote may go on after its lease was taken back, into blocks that are somebody
else's by then. So what is summed is never read from shared blocks before it can no longer matter: the sender sums its
own blocks, the receiver what has arrived in its own.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from alignedserve.core.block_allocator import contiguous_runs
from alignedserve.core.errors import HandoffRejected
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.runtime.kv.block_checksums import (
    RunSums,
    blocks_of,
    check_target,
    checked_sums,
    copy_rows,
    placed,
    summed_runs,
)
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import NOBODYS, Arena

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request's blocks on their way out of a storage."""

    storage_block_ids: Sequence[BlockId]
    target_block_ids: Sequence[BlockId]  # as many
    generation: int  # of the lease on the target blocks


@dataclass(frozen=True, slots=True)
class Incoming:
    """One request's copy on its way into a storage."""

    copy: BlockCopy
    storage_block_ids: Sequence[BlockId]  # at least as many as the copy has


class KVTransfer(Protocol):
    """Copies whole blocks, one request after the other. Blocking; called from one thread of a worker at a time.

    A request that is refused is logged with its reason and fails nobody else. Both raise PeerLost when whoever owns the
    blocks at the other end is gone; then nothing is known of any request of that call. Shared memory outlives its
    owner, so there it is the links that notice.
    """

    def offload(self, outgoing: Sequence[Outgoing]) -> list[tuple[BlockRun, ...] | None]:
        """Copy out and return the runs with their checksums; None: refused, and the target blocks are undefined."""

    def fetch(self, incoming: Sequence[Incoming]) -> list[bool]:
        """Copy in and verify. False: it does not hold, and its storage blocks are undefined."""

    def close(self) -> None:
        """Let go of the other end. May be repeated; nothing else may be called after it."""


class ShmTransfer:
    """KVTransfer over an arena mapped into this process, which it closes.

    In the pool's arena the pool stamps the blocks that it leases, and writing elsewhere is refused. In a candidate
    buffer (`stamps`) the owner only says which blocks are free to write, and the writer stamps them.
    """

    def __init__(self, storage: BlockStorage, arena: Arena, *, stamps: bool = False) -> None:
        self.arena = arena
        self.stamps = stamps
        self._storage = storage
        self._is_closed = False

    def offload(self, outgoing: Sequence[Outgoing]) -> list[tuple[BlockRun, ...] | None]:
        """See KVTransfer."""
        return [self._offload_one(one) for one in outgoing]

    def fetch(self, incoming: Sequence[Incoming]) -> list[bool]:
        """See KVTransfer."""
        return [self._fetch_one(one) for one in incoming]

    def close(self) -> None:
        """See KVTransfer."""
        if not self._is_closed:
            self._is_closed = True
            self.arena.close()

    def _offload_one(self, outgoing: Outgoing) -> tuple[BlockRun, ...] | None:
        target, generation = outgoing.target_block_ids, outgoing.generation
        try:
            check_target(target, len(outgoing.storage_block_ids), generation, self.arena.num_blocks)
            if self.stamps:
                self.arena.stamp(target, generation)
            _check_lease(self.arena, target, generation)
        except HandoffRejected as error:
            logger.warning("offload under generation %d refused: %s", generation, error)
            return None
        runs = contiguous_runs(target)
        sums = RunSums(placed(count for _, count in runs), self.arena.layout.block_bytes)
        source = self._storage.rows_to_read(outgoing.storage_block_ids)
        copy_rows(source, self.arena.rows_to_write(target), sums, from_target=False)
        return summed_runs(runs, sums.sums)

    def _fetch_one(self, incoming: Incoming) -> bool:
        copy, arena = incoming.copy, self.arena
        num_targets = len(incoming.storage_block_ids)
        try:
            source = blocks_of(
                copy, block_size=arena.layout.block_size, num_targets=num_targets, num_blocks=arena.num_blocks
            )
            _check_lease(arena, source, copy.generation)
            sums = RunSums(placed(run.num_blocks for run in copy.runs), arena.layout.block_bytes)
            target = self._storage.rows_to_write(incoming.storage_block_ids[: len(source)])
            copy_rows(arena.rows_to_read(source), target, sums, from_target=True)
            checked_sums(copy, sums.sums)
            # The lease may have been taken back while we copied: what we have is then nobody's data.
            _check_lease(arena, source, copy.generation)
        except HandoffRejected as error:
            logger.warning("fetch of generation %d refused: %s", copy.generation, error)
            return False
        return True


def relay(
    source: Arena,
    copy: BlockCopy,
    target: Arena,
    target_block_ids: Sequence[BlockId],
    generation: int,
    *,
    stamps: bool = True,
) -> tuple[BlockRun, ...] | None:
    """Copy a request's blocks from one arena to another and verify them; its runs there, with new checksums.

    There must be as many target blocks as the copy has. In a candidate buffer they are stamped first, and are nobody's
    when None comes back; in the pool's arena (`stamps` is false) the pool has stamped them.
    """
    assert source.layout == target.layout, "blocks are copied between arenas of one layout"
    try:
        check_target(target_block_ids, copy.num_blocks, generation, target.num_blocks)
    except HandoffRejected as error:
        logger.warning("relay of generation %d refused: %s", copy.generation, error)
        return None
    try:
        if stamps:
            target.stamp(target_block_ids, generation)
        return _relay(source, copy, target, target_block_ids, generation)
    except HandoffRejected as error:
        if stamps:
            target.stamp(target_block_ids, NOBODYS)
        logger.warning("relay of generation %d refused: %s", copy.generation, error)
        return None


def _relay(
    source: Arena, copy: BlockCopy, target: Arena, target_block_ids: Sequence[BlockId], generation: int
) -> tuple[BlockRun, ...]:
    layout, num_targets = source.layout, len(target_block_ids)
    source_ids = blocks_of(copy, block_size=layout.block_size, num_targets=num_targets, num_blocks=source.num_blocks)
    _check_lease(source, source_ids, copy.generation)
    _check_lease(target, target_block_ids, generation)
    runs = contiguous_runs(target_block_ids)
    told, own = placed(run.num_blocks for run in copy.runs), placed(count for _, count in runs)
    old = RunSums(told, layout.block_bytes)
    new = old if own == told else RunSums(own, layout.block_bytes)
    # Both sums see the same bytes, so what is signed anew is what the old sums were of.
    wanted = (old,) if new is old else (old, new)
    rows = target.rows_to_write(target_block_ids)
    copy_rows(source.rows_to_read(source_ids), rows, *wanted, from_target=True)
    checked_sums(copy, old.sums)
    _check_lease(source, source_ids, copy.generation)
    return summed_runs(runs, new.sums)


def _check_lease(arena: Arena, block_ids: Sequence[BlockId], generation: int) -> None:
    if not arena.is_stamped(block_ids, generation):
        raise HandoffRejected("the lease is no longer valid")
