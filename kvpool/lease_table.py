"""Block accounting of the pool: the leases on its blocks, and the kept copies in the order of their eviction."""

import heapq

from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.ids import BlockId, LeaseId, RequestId
from kvpool.state import Lease, LeaseStage, Reservation

_MAX_SKIPPED = 64  # stale entries allowed in the heap, beside as many as there are copies


class LeaseTable:
    """Leases by number and by request. It only accounts for them; the logic decides.

    Leases are numbered from `first_lease`, which should differ after every restart of a pool: a worker may still act on
    a lease of the former process, and must not hit a current one.
    """

    def __init__(self, num_blocks: int, first_lease: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self._leases: dict[LeaseId, Lease] = {}
        self._of_request: dict[RequestId, dict[LeaseId, Lease]] = {}
        self._reserved: dict[LeaseId, Lease] = {}
        self._kept: list[tuple[bool, float, LeaseId]] = []  # heap of reclaim keys; entries no longer kept are skipped
        self._num_kept = 0
        self._num_kept_blocks = 0
        self._next_lease = first_lease

    @property
    def num_blocks(self) -> int:
        return self.allocator.num_blocks

    @property
    def num_used(self) -> int:
        return self.allocator.num_used

    @property
    def num_kept(self) -> int:
        return self._num_kept_blocks

    def take_number(self) -> LeaseId:
        """Return the number of a lease that is not in this table; it is never used again."""
        number, self._next_lease = LeaseId(self._next_lease), self._next_lease + 1
        return number

    def get(self, lease_id: LeaseId) -> Lease | None:
        return self._leases.get(lease_id)

    def of_request(self, request_id: RequestId) -> list[Lease]:
        return list(self._of_request.get(request_id, {}).values())

    def reserved(self) -> list[Lease]:
        return list(self._reserved.values())

    def all(self) -> list[Lease]:
        return list(self._leases.values())

    def can_allocate(self, num_blocks: int) -> bool:
        """Return True if `num_blocks` are free, or would be without the kept copies."""
        return num_blocks <= self.allocator.num_free + self._num_kept_blocks

    def copies_to_evict(self, num_blocks: int) -> list[Lease]:
        """Return the kept copies to evict until `num_blocks` are free, in order; the caller must close them all."""
        evicted: dict[LeaseId, Lease] = {}
        num_free = self.allocator.num_free
        while num_free < num_blocks and self._kept:
            lease = self._leases.get(heapq.heappop(self._kept)[-1])
            if lease is not None and lease.stage is LeaseStage.KEPT and lease.lease_id not in evicted:
                evicted[lease.lease_id] = lease
                num_free += len(lease.block_ids)
        return list(evicted.values())

    def open(self, reservation: Reservation, deadline_s: float) -> Lease:
        """Open a lease on free blocks; as many as reserved must be free."""
        block_ids = self.allocator.allocate(reservation.num_blocks)
        assert block_ids is not None, "a lease on blocks that are not free"
        lease = Lease(
            self.take_number(),
            reservation.request_id,
            reservation.attempt,
            block_ids,
            LeaseStage.RESERVED,
            reservation.worker,
            deadline_s,
            reservation.is_copy,
        )
        self._leases[lease.lease_id] = self._reserved[lease.lease_id] = lease
        self._of_request.setdefault(lease.request_id, {})[lease.lease_id] = lease
        return lease

    def move(self, lease: Lease, stage: LeaseStage) -> None:
        self._leave_stage(lease)
        lease.stage = stage
        if stage is LeaseStage.KEPT:
            self._num_kept += 1
            self._num_kept_blocks += len(lease.block_ids)
            heapq.heappush(self._kept, lease.reclaim_key)
            if len(self._kept) > 2 * self._num_kept + _MAX_SKIPPED:
                self._compact_heap()

    def shorten(self, lease: Lease, num_blocks: int) -> tuple[BlockId, ...]:
        """Free the blocks of a lease after the first `num_blocks`, and return them."""
        surplus, lease.block_ids = lease.block_ids[num_blocks:], lease.block_ids[:num_blocks]
        self.allocator.free(surplus)
        return surplus

    def close(self, lease: Lease) -> tuple[BlockId, ...]:
        self._leave_stage(lease)
        self.allocator.free(lease.block_ids)
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
        self._kept = sorted({key for key in self._kept if self._is_kept(key[-1])})

    def _is_kept(self, lease_id: LeaseId) -> bool:
        lease = self._leases.get(lease_id)
        return lease is not None and lease.stage is LeaseStage.KEPT
