"""KVTransfer over an arena in shared memory."""

from pathlib import Path

from typing_extensions import override

from alignedserve.core.errors import HandoffRejected
from alignedserve.messages.caches import ArenaOffered
from alignedserve.runtime.device.cores import threads_per_copy
from alignedserve.runtime.kv.block_runs import BlockIds, Ints
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.direct_copies import HostSide
from alignedserve.runtime.kv.list_copies import copy_from_pieces, copy_to_pieces
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.local_transfer import LocalTransfer
from kernels.cpu.block_copies import Digests


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
    """Map the arena that is offered, or the storage's part of it. `stamps`: as in ShmTransfer.

    Raises HandoffRejected when its path leads elsewhere, as on another host, or its blocks are of another layout.
    """
    part = storage.part
    arena = Arena.attach(Path(offered.path), part.whole(storage.layout), part)
    if offered.file_id and arena.file_id != offered.file_id:
        arena.close()
        raise HandoffRejected("the file at its path is another one, of another host or container")
    return ShmTransfer(storage, arena, stamps=stamps, num_threads=threads_per_copy(), lanes=storage.lanes)
