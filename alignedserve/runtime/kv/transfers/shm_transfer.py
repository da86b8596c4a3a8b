"""KVTransfer over an arena in shared memory, and copies from one arena to another."""

import logging
from collections.abc import Sequence

from alignedserve.core.block_allocator import contiguous_runs
from alignedserve.core.errors import HandoffRejected
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.runtime.kv.block_checksums import (
    RunChecksums,
    check_target,
    copy_rows,
    place_runs,
    runs_with_checksums,
    source_blocks,
    verify_checksums,
)
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import NO_LEASE, Arena
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest

logger = logging.getLogger(__name__)


class ShmTransfer:
    """KVTransfer over an arena mapped into this process, which it closes.

    The pool stamps the blocks that it leases in its arena; writing elsewhere is refused. In a candidate buffer
    (`stamps`) the owner only says which blocks are free to write, and the writer stamps them.
    """

    def __init__(self, storage: BlockStorage, arena: Arena, *, stamps: bool = False) -> None:
        self.arena = arena
        self.stamps = stamps
        self._storage = storage
        self._is_closed = False

    def offload(self, requests: Sequence[OffloadRequest]) -> list[tuple[BlockRun, ...] | None]:
        """See KVTransfer."""
        return [self._offload_one(request) for request in requests]

    def fetch(self, requests: Sequence[FetchRequest]) -> list[bool]:
        """See KVTransfer."""
        return [self._fetch_one(request) for request in requests]

    def close(self) -> None:
        """See KVTransfer."""
        if not self._is_closed:
            self._is_closed = True
            self.arena.close()

    def _offload_one(self, request: OffloadRequest) -> tuple[BlockRun, ...] | None:
        target, generation = request.target_block_ids, request.generation
        try:
            check_target(target, len(request.storage_block_ids), generation, self.arena.num_blocks)
            if self.stamps:
                self.arena.stamp(target, generation)
            _check_lease(self.arena, target, generation)
        except HandoffRejected as error:
            logger.warning("offload under generation %d refused: %s", generation, error)
            return None
        runs = contiguous_runs(target)
        checksums = RunChecksums(place_runs(count for _, count in runs), self.arena.layout.block_bytes)
        source = self._storage.rows_to_read(request.storage_block_ids)
        copy_rows(source, self.arena.rows_to_write(target), checksums, from_target=False)
        return runs_with_checksums(runs, checksums.values)

    def _fetch_one(self, request: FetchRequest) -> bool:
        copy, arena = request.copy, self.arena
        num_targets = len(request.storage_block_ids)
        try:
            source = source_blocks(
                copy, block_size=arena.layout.block_size, num_targets=num_targets, num_blocks=arena.num_blocks
            )
            _check_lease(arena, source, copy.generation)
            checksums = RunChecksums(place_runs(run.num_blocks for run in copy.runs), arena.layout.block_bytes)
            target = self._storage.rows_to_write(request.storage_block_ids[: len(source)])
            copy_rows(arena.rows_to_read(source), target, checksums, from_target=True)
            verify_checksums(copy, checksums.values)
            # The lease may have been revoked during the copy: the data is then another request's.
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
    """Copy a request's blocks from one arena to another, verify them and return its new runs with their checksums.

    There must be as many target blocks as the copy has. In a candidate buffer they are stamped first, and unstamped
    when the result is None; in the pool's arena (`stamps` is false) the pool has stamped them.
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
            target.stamp(target_block_ids, NO_LEASE)
        logger.warning("relay of generation %d refused: %s", copy.generation, error)
        return None


def _relay(
    source: Arena, copy: BlockCopy, target: Arena, target_block_ids: Sequence[BlockId], generation: int
) -> tuple[BlockRun, ...]:
    layout, num_targets = source.layout, len(target_block_ids)
    source_ids = source_blocks(
        copy, block_size=layout.block_size, num_targets=num_targets, num_blocks=source.num_blocks
    )
    _check_lease(source, source_ids, copy.generation)
    _check_lease(target, target_block_ids, generation)
    runs = contiguous_runs(target_block_ids)
    sent, own = place_runs(run.num_blocks for run in copy.runs), place_runs(count for _, count in runs)
    old = RunChecksums(sent, layout.block_bytes)
    new = old if own == sent else RunChecksums(own, layout.block_bytes)
    # Both see the same bytes, so the new checksums are of exactly what the old ones verify.
    wanted = (old,) if new is old else (old, new)
    rows = target.rows_to_write(target_block_ids)
    copy_rows(source.rows_to_read(source_ids), rows, *wanted, from_target=True)
    verify_checksums(copy, old.values)
    _check_lease(source, source_ids, copy.generation)
    return runs_with_checksums(runs, new.values)


def _check_lease(arena: Arena, block_ids: Sequence[BlockId], generation: int) -> None:
    if not arena.is_stamped(block_ids, generation):
        raise HandoffRejected("the lease is no longer valid")
