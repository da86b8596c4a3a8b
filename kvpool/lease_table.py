"""The pool's books: its blocks, every lease on them, and the copies that are given up first when room is short."""

import heapq

from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.ids import BlockId, LeaseId, RequestId
from kvpool.state import Lease, LeaseStage, Reservation

_MAX_SKIPPED = 64  # entries of the heap that may be void, beside as many as there are copies


class LeaseTable:
    """Leases by number and by request. Keeps count; who may do what when is the logic's to decide.

    Leases are numbered from `first_lease`, which should differ from one life of a pool to the next: a worker may still
    act on a lease of the one before, and must not hit one of this.
    """

    def __init__(self, num_blocks: int, first_lease: int) -> None:
        self._allocator = BlockAllocator(num_blocks)
        self._leases: dict[LeaseId, Lease] = {}
        self._of_request: dict[RequestId, dict[LeaseId, Lease]] = {}
        self._reserved: dict[LeaseId, Lease] = {}
        self._kept: list[tuple[bool, float, LeaseId]] = []  # heap; entries that are no longer kept are skipped
        self._num_kept = 0
        self._num_kept_blocks = 0
        self._next_lease = first_lease

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._allocator.num_blocks

    @property
    def num_used(self) -> int:
        """Blocks under any lease."""
        return self._allocator.num_used

    @property
    def num_kept(self) -> int:
        """Blocks of copies that would be given up for room."""
        return self._num_kept_blocks

    def get(self, lease_id: LeaseId) -> Lease | None:
        """The lease, if it has not ended."""
        return self._leases.get(lease_id)

    def of_request(self, request_id: RequestId) -> list[Lease]:
        """Every lease on blocks of this request, the oldest first."""
        return list(self._of_request.get(request_id, {}).values())

    def reserved(self) -> list[Lease]:
        """Leases that are being written, the oldest first."""
        return list(self._reserved.values())

    def all(self) -> list[Lease]:
        """Every lease, the oldest first."""
        return list(self._leases.values())

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether so many blocks are free, or would be without the kept copies."""
        return num_blocks <= self._allocator.num_free + self._num_kept_blocks

    def copies_to_evict(self, num_blocks: int) -> list[Lease]:
        """The kept copies whose end would make room for so many blocks, in the order in which they go."""
        given_up: dict[LeaseId, Lease] = {}
        room = self._allocator.num_free
        while room < num_blocks and self._kept:
            lease = self._leases.get(heapq.heappop(self._kept)[-1])
            if lease is not None and lease.stage is LeaseStage.KEPT and lease.lease_id not in given_up:
                given_up[lease.lease_id] = lease
                room += len(lease.block_ids)
        return list(given_up.values())

    def open(self, reservation: Reservation, deadline_s: float) -> Lease:
        """A new lease on free blocks, which must be there."""
        block_ids = self._allocator.allocate(reservation.num_blocks)
        assert block_ids is not None, "a lease on blocks that are not free"
        lease = Lease(
            LeaseId(self._next_lease),
            reservation.request_id,
            reservation.attempt,
            block_ids,
            LeaseStage.RESERVED,
            reservation.worker,
            deadline_s,
            reservation.is_copy,
        )
        self._next_lease += 1
        self._leases[lease.lease_id] = self._reserved[lease.lease_id] = lease
        self._of_request.setdefault(lease.request_id, {})[lease.lease_id] = lease
        return lease

    def move(self, lease: Lease, stage: LeaseStage) -> None:
        """Take a lease to its next stage."""
        self._leave_stage(lease)
        lease.stage = stage
        if stage is LeaseStage.KEPT:
            self._num_kept += 1
            self._num_kept_blocks += len(lease.block_ids)
            heapq.heappush(self._kept, lease.reclaim_key)
            if len(self._kept) > 2 * self._num_kept + _MAX_SKIPPED:
                self._compact_heap()

    def end(self, lease: Lease) -> tuple[BlockId, ...]:
        """Free its blocks and forget it; the blocks."""
        self._leave_stage(lease)
        self._allocator.free(lease.block_ids)
        del self._leases[lease.lease_id]
        leases = self._of_request[lease.request_id]
        del leases[lease.lease_id]
        if not leases:
            del self._of_request[lease.request_id]
        return lease.block_ids

    def _leave_stage(self, lease: Lease) -> None:
        self._reserved.pop(lease.lease_id, None)
        if lease.stage is LeaseStage.KEPT:
            self._num_kept -= 1
            self._num_kept_blocks -= len(lease.block_ids)

    def _compact_heap(self) -> None:
        """While room is never short nobody takes entries off the heap: copies that ended must not pile up there."""
        self._kept = sorted({key for key in self._kept if self._is_kept(key[-1])})

    def _is_kept(self, lease_id: LeaseId) -> bool:
        lease = self._leases.get(lease_id)
        return lease is not None and lease.stage is LeaseStage.KEPT
