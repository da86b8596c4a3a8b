"""KVTransfer to blocks that this process copies itself, and copies of requests from one such memory to another.

KVTransfer over an arena in shared memory."""

import abc
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from alignedserve.core.errors import HandoffRejected
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import ArenaOffered, BlockCopy, BlockRun
from alignedserve.runtime.device.cores import threads_per_copy
from alignedserve.runtime.kv.block_checksums import (
    check_target,
    run_checksums,
    runs_of,
    runs_with_checksums,
    source_blocks,
    verify_checksums,
)
from alignedserve.runtime.kv.block_runs import BlockIds, BlockRuns, Ints, as_ids
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.direct_copies import HostSide, PeerSide
from alignedserve.runtime.kv.list_copies import copy_from_pieces, copy_to_pieces
from alignedserve.runtime.kv.shm_arena import NO_LEASE, Arena, ArenaPart
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest, verified
from alignedserve.runtime.kv.transfers.requests import DeviceBuffer
from kernels.cpu.block_copies import Digests, copy_blocks

logger = logging.getLogger(__name__)

LocalMemory = Arena | DeviceBuffer


class Relayed(NamedTuple):
    """The checksums of blocks, or of parts of them, that were copied from one memory to another, by their runs."""

    read: list[int]
    written: list[int]


class LocalTransfer(abc.ABC):
    """KVTransfer to a memory that this process reaches without asking anyone; a subclass copies. The pool stamps the
    blocks that it leases in its arena; writing elsewhere is refused. In a candidate buffer (`stamps`) the owner only
    says which blocks are free to write, and the writer stamps them."""

    def __init__(self, memory: LocalMemory, *, stamps: bool, num_threads: int = 1) -> None:
        self.memory = memory
        self.stamps = stamps
        self.num_threads = num_threads

    def offload(self, requests: Sequence[OffloadRequest]) -> list[tuple[BlockRun, ...] | None]:
        return [self._offload_one(request) for request in requests]

    def fetch(self, requests: Sequence[FetchRequest]) -> list[bool]:
        return verified(requests, self.fetch_unverified(requests))

    def fetch_unverified(self, requests: Sequence[FetchRequest]) -> list[list[int] | None]:
        return [self._fetch_one(request) for request in requests]

    @abc.abstractmethod
    def close(self) -> None: ...

    @abc.abstractmethod
    def _copy_out(self, block_ids: BlockIds, target: Ints) -> Digests:
        """Copy blocks of the storage to these of the memory, and return their digests."""

    @abc.abstractmethod
    def _copy_in(self, source: Ints, block_ids: BlockIds) -> Digests:
        """Copy blocks of the memory to these of the storage, and return their digests."""

    def _offload_one(self, request: OffloadRequest) -> tuple[BlockRun, ...] | None:
        generation = request.generation
        try:
            target = as_ids(request.target_block_ids)
            check_target(target, len(request.storage_block_ids), generation, self.memory.num_blocks)
            if self.stamps:
                self.memory.stamp(target, generation)
            _check_lease(self.memory, target, generation)
        except HandoffRejected as error:
            logger.warning("offload under generation %d refused: %s", generation, error)
            return None
        digests = self._copy_out(request.storage_block_ids, target)
        runs = request.runs
        return runs_with_checksums(runs, run_checksums(digests, runs.placed(request.num_before or 0)))

    def _fetch_one(self, request: FetchRequest) -> list[int] | None:
        copy, memory = request.copy, self.memory
        num_targets = len(request.storage_block_ids)
        try:
            source = source_blocks(copy, layout=memory.layout, num_targets=num_targets, num_blocks=memory.num_blocks)
            _check_lease(memory, source, copy.generation)
            digests = self._copy_in(source, request.storage_block_ids[: len(source)])
            # The lease may have been revoked during the copy: the data is then another request's.
            _check_lease(memory, source, copy.generation)
        except HandoffRejected as error:
            logger.warning("fetch of generation %d refused: %s", copy.generation, error)
            return None
        return run_checksums(digests, runs_of(copy).placed(copy.num_before))


def relay(
    source: LocalTransfer, copy: BlockCopy, target: LocalTransfer, target_block_ids: Sequence[BlockId], generation: int
) -> tuple[BlockRun, ...] | None:
    """Copy a request's blocks from one memory to another, verify them and return its new runs with their checksums. The
    copy needs an equal number of target blocks. In a candidate buffer (`target.stamps`) they are stamped first, and
    unstamped when the result is None; in the pool's arena the pool has stamped them."""
    relayed = relay_unverified(source, copy, target, target_block_ids, generation)
    return None if relayed is None else verified_relay(relayed, copy, target, target_block_ids)


def relay_unverified(
    source: LocalTransfer,
    copy: BlockCopy,
    target: LocalTransfer,
    target_block_ids: Sequence[BlockId],
    generation: int,
    part: ArenaPart | None = None,
) -> Relayed | None:
    """Copy a request's blocks as `relay` does; the checksums are still to be verified.

    `part`: of each block, between two arenas."""
    assert source.memory.layout == target.memory.layout, "blocks are copied between memories of one layout"
    try:
        target_ids = as_ids(target_block_ids)
        check_target(target_ids, copy.num_blocks, generation, target.memory.num_blocks)
    except HandoffRejected as error:
        _log_refused(copy, error)
        return None
    try:
        if target.stamps:
            target.memory.stamp(target_ids, generation)
        return _relay(source.memory, copy, target, target_ids, generation, part)
    except HandoffRejected as error:
        _refuse(copy, target, target_ids, error)
        return None


def verified_relay(
    relayed: Relayed, copy: BlockCopy, target: LocalTransfer, target_block_ids: Sequence[BlockId]
) -> tuple[BlockRun, ...] | None:
    target_ids = as_ids(target_block_ids)
    try:
        verify_checksums(copy, relayed.read)
    except HandoffRejected as error:
        _refuse(copy, target, target_ids, error)
        return None
    return runs_with_checksums(BlockRuns.of(target_ids), relayed.written)


def _refuse(copy: BlockCopy, target: LocalTransfer, target_ids: Ints, error: HandoffRejected) -> None:
    if target.stamps:
        target.memory.stamp(target_ids, NO_LEASE)
    _log_refused(copy, error)


def _log_refused(copy: BlockCopy, error: HandoffRejected) -> None:
    logger.warning("relay of generation %d refused: %s", copy.generation, error)


def _relay(
    source: LocalMemory,
    copy: BlockCopy,
    target: LocalTransfer,
    target_ids: Ints,
    generation: int,
    part: ArenaPart | None,
) -> Relayed:
    layout, num_targets = source.layout, len(target_ids)
    source_ids = source_blocks(copy, layout=layout, num_targets=num_targets, num_blocks=source.num_blocks)
    _check_lease(source, source_ids, copy.generation)
    _check_lease(target.memory, target_ids, generation)
    # Every byte is summed once, so the new checksums are of exactly what the old ones verify.
    digests = _copied(source, source_ids, target, target_ids, part)
    _check_lease(source, source_ids, copy.generation)
    read = run_checksums(digests, runs_of(copy).placed(copy.num_before))
    return Relayed(read, run_checksums(digests, BlockRuns.of(target_ids).placed()))


def _copied(
    source: LocalMemory, source_ids: Ints, target: LocalTransfer, target_ids: Ints, part: ArenaPart | None
) -> Digests:
    memory = target.memory
    if isinstance(source, Arena):
        if isinstance(memory, Arena):
            there = memory.listed(target_ids, part)
            return copy_blocks(source.listed(source_ids, part), there, num_threads=target.num_threads)
        if not source.is_registered:
            return copy_to_pieces(source.listed(source_ids), memory.pieces_to_write(target_ids))
        with memory.lanes.direct() as copies:
            return copies.copy_in(_registered(source, source_ids), memory.blocks, target_ids)
    if isinstance(memory, Arena) and not memory.is_registered:
        return copy_from_pieces(source.pieces_to_read(source_ids), memory.listed(target_ids))
    other = _registered(memory, target_ids) if isinstance(memory, Arena) else PeerSide(memory.blocks, target_ids)
    with source.lanes.direct() as copies:
        return copies.copy_out(source.blocks, source_ids, other)


def _registered(arena: Arena, block_ids: Ints) -> HostSide:
    return HostSide(arena.listed(block_ids), arena.rows_per_registration)


def _check_lease(memory: LocalMemory, block_ids: Ints, generation: int) -> None:
    if not memory.is_stamped(block_ids, generation):
        raise HandoffRejected("the lease is no longer valid")


class OwnBufferTransfer(LocalTransfer):
    """KVTransfer between a storage and a buffer of the same device."""

    def __init__(self, storage: BlockStorage, buffer: DeviceBuffer) -> None:
        super().__init__(buffer, stamps=True)
        self._storage = storage
        self._buffer = buffer

    @override
    def close(self) -> None: ...

    @override
    def _copy_out(self, block_ids: BlockIds, target: Ints) -> Digests:
        there = PeerSide(self._buffer.blocks, target)
        with self._buffer.lanes.direct() as copies:
            return copies.copy_out(self._storage.bytes, self._storage.settled(block_ids), there)

    @override
    def _copy_in(self, source: Ints, block_ids: BlockIds) -> Digests:
        there = PeerSide(self._buffer.blocks, source)
        with self._buffer.lanes.direct() as copies:
            return copies.copy_in(there, self._storage.bytes, self._storage.settled(block_ids))


class ShmTransfer(LocalTransfer):
    """KVTransfer over an arena mapped into this process; closes the arena."""

    def __init__(
        self,
        storage: BlockStorage,
        arena: Arena,
        *,
        stamps: bool = False,
        num_threads: int = 1,
        lanes: CopyLanes | None = None,
    ) -> None:
        """`stamps`, `num_threads`: see LocalTransfer. `lanes`: of the storage's device; the arena is registered with
        its driver, if that is possible, so that the device copies straight to and from it."""
        super().__init__(arena, stamps=stamps, num_threads=num_threads)
        self.arena = arena
        self._storage = storage
        self._is_closed = False
        self._lanes: CopyLanes | None = None  # None: through the host
        if lanes is not None:
            arena.register(lanes.accelerator.driver)
            self._lanes = lanes if arena.is_registered else None

    @override
    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.arena.close()

    @override
    def _copy_out(self, block_ids: BlockIds, target: Ints) -> Digests:
        there = self.arena.listed(target)
        if self._lanes is not None:
            with self._lanes.direct() as copies:
                return copies.copy_out(
                    self._storage.bytes,
                    self._storage.settled(block_ids),
                    HostSide(there, self.arena.rows_per_registration),
                )
        return copy_from_pieces(self._storage.pieces_to_read(block_ids), there, num_threads=self.num_threads)

    @override
    def _copy_in(self, source: Ints, block_ids: BlockIds) -> Digests:
        there = self.arena.listed(source)
        if self._lanes is not None:
            with self._lanes.direct() as copies:
                return copies.copy_in(
                    HostSide(there, self.arena.rows_per_registration),
                    self._storage.bytes,
                    self._storage.settled(block_ids),
                )
        return copy_to_pieces(there, self._storage.pieces_to_write(block_ids), num_threads=self.num_threads)


def open_shm_transfer(offered: ArenaOffered, storage: BlockStorage, *, stamps: bool = False) -> ShmTransfer:
    """Map the arena that is offered, or the storage's part of it. `stamps`: as in ShmTransfer. Raises HandoffRejected
    when its path leads elsewhere, as on another host, or its blocks are of another layout."""
    part = storage.part
    arena = Arena.attach(Path(offered.path), part.whole(storage.layout), part)
    if offered.file_id and arena.file_id != offered.file_id:
        arena.close()
        raise HandoffRejected("the file at its path is another one, of another host or container")
    return ShmTransfer(storage, arena, stamps=stamps, num_threads=threads_per_copy(), lanes=storage.lanes)
