"""KVTransfer over an arena in shared memory, and copies from one arena to another."""

import logging
from collections.abc import Sequence

from alignedserve.core.errors import HandoffRejected
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.runtime.device.registered_memory import MemoryDriver
from alignedserve.runtime.kv.block_checksums import (
    check_target,
    run_checksums,
    runs_with_checksums,
    source_blocks,
    verify_digests,
)
from alignedserve.runtime.kv.block_runs import BlockIds, BlockRuns, Ints, as_ids
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.direct_copies import DirectCopies
from alignedserve.runtime.kv.list_copies import copy_from_pieces, copy_to_pieces
from alignedserve.runtime.kv.shm_arena import NO_LEASE, Arena
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from kernels.cpu.block_copies import BlockList, Digests, copy_blocks

logger = logging.getLogger(__name__)


class ShmTransfer:
    """KVTransfer over an arena mapped into this process, which it closes.

    The pool stamps the blocks that it leases in its arena; writing elsewhere is refused. In a candidate buffer
    (`stamps`) the owner only says which blocks are free to write, and the writer stamps them.
    """

    def __init__(
        self,
        storage: BlockStorage,
        arena: Arena,
        *,
        stamps: bool = False,
        num_threads: int = 1,
        driver: MemoryDriver | None = None,
    ) -> None:
        """`num_threads`: of each copy, the calling one included. `driver`: of the storage's device; the arena is
        registered with it, if that is possible, so that the device copies straight to and from it."""
        self.arena = arena
        self.stamps = stamps
        self.num_threads = num_threads
        self._storage = storage
        self._is_closed = False
        self._direct: DirectCopies | None = None
        if driver is not None:
            arena.register(driver)
            self._direct = DirectCopies(storage.bytes) if arena.is_registered else None

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
        generation = request.generation
        try:
            target = as_ids(request.target_block_ids)
            check_target(target, len(request.storage_block_ids), generation, self.arena.num_blocks)
            if self.stamps:
                self.arena.stamp(target, generation)
            _check_lease(self.arena, target, generation)
        except HandoffRejected as error:
            logger.warning("offload under generation %d refused: %s", generation, error)
            return None
        digests = self._copy_out(request.storage_block_ids, self.arena.listed(target))
        runs = request.runs
        return runs_with_checksums(runs, run_checksums(digests, runs.placed(request.num_before or 0)))

    def _fetch_one(self, request: FetchRequest) -> bool:
        copy, arena = request.copy, self.arena
        num_targets = len(request.storage_block_ids)
        try:
            source = source_blocks(
                copy, block_size=arena.layout.block_size, num_targets=num_targets, num_blocks=arena.num_blocks
            )
            _check_lease(arena, source, copy.generation)
            digests = self._copy_in(arena.listed(source), request.storage_block_ids[: len(source)])
            verify_digests(copy, digests)
            # The lease may have been revoked during the copy: the data is then another request's.
            _check_lease(arena, source, copy.generation)
        except HandoffRejected as error:
            logger.warning("fetch of generation %d refused: %s", copy.generation, error)
            return False
        return True

    def _copy_out(self, block_ids: BlockIds, target: BlockList) -> Digests:
        if self._direct is not None:
            return self._direct.copy_out(self._storage.settled(block_ids), target)
        return copy_from_pieces(self._storage.pieces_to_read(block_ids), target, num_threads=self.num_threads)

    def _copy_in(self, source: BlockList, block_ids: BlockIds) -> Digests:
        if self._direct is not None:
            return self._direct.copy_in(source, self._storage.settled(block_ids))
        return copy_to_pieces(source, self._storage.pieces_to_write(block_ids), num_threads=self.num_threads)


def relay(
    source: ShmTransfer, copy: BlockCopy, target: ShmTransfer, target_block_ids: Sequence[BlockId], generation: int
) -> tuple[BlockRun, ...] | None:
    """Copy a request's blocks from one arena to another, verify them and return its new runs with their checksums.

    There must be as many target blocks as the copy has. In a candidate buffer (`target.stamps`) they are stamped first,
    and unstamped when the result is None; in the pool's arena the pool has stamped them.
    """
    assert source.arena.layout == target.arena.layout, "blocks are copied between arenas of one layout"
    try:
        target_ids = as_ids(target_block_ids)
        check_target(target_ids, copy.num_blocks, generation, target.arena.num_blocks)
    except HandoffRejected as error:
        logger.warning("relay of generation %d refused: %s", copy.generation, error)
        return None
    try:
        if target.stamps:
            target.arena.stamp(target_ids, generation)
        return _relay(source.arena, copy, target, target_ids, generation)
    except HandoffRejected as error:
        if target.stamps:
            target.arena.stamp(target_ids, NO_LEASE)
        logger.warning("relay of generation %d refused: %s", copy.generation, error)
        return None


def _relay(
    source: Arena, copy: BlockCopy, target: ShmTransfer, target_ids: Ints, generation: int
) -> tuple[BlockRun, ...]:
    layout, num_targets = source.layout, len(target_ids)
    source_ids = source_blocks(
        copy, block_size=layout.block_size, num_targets=num_targets, num_blocks=source.num_blocks
    )
    _check_lease(source, source_ids, copy.generation)
    _check_lease(target.arena, target_ids, generation)
    # Every byte is read once, so the new checksums are of exactly what the old ones verify.
    to = target.arena.listed(target_ids)
    digests = copy_blocks(source.listed(source_ids), to, num_threads=target.num_threads)
    verify_digests(copy, digests)
    _check_lease(source, source_ids, copy.generation)
    runs = BlockRuns.of(target_ids)
    return runs_with_checksums(runs, run_checksums(digests, runs.placed()))


def _check_lease(arena: Arena, block_ids: Ints, generation: int) -> None:
    if not arena.is_stamped(block_ids, generation):
        raise HandoffRejected("the lease is no longer valid")
