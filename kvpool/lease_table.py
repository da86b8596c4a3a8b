"""Block accounting of the pool: the leases on its blocks, and the kept copies in the order of their eviction."""

import heapq
from collections import deque
from collections.abc import Callable

from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.class_floor import ClassFloor
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
                self._kept = sorted({key for key in self._kept if self._is_kept(key[-1])})

    def shorten(self, lease: Lease, num_blocks: int) -> tuple[BlockId, ...]:
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

    def _is_kept(self, lease_id: LeaseId) -> bool:
        lease = self._leases.get(lease_id)
        return lease is not None and lease.stage is LeaseStage.KEPT


_KEPT_SHARE = 1 / 8  # of the blocks, from best effort

CanAllocate = Callable[[int], bool]  # whether so many blocks are free, or can be made free


class WaitingReservations:
    """Reservations that wait for free blocks, by class and then by arrival. `can_allocate`: of the blocks as they
    are now.

    Real-time requests go first, and best effort leaves an eighth of the blocks to them: a chat never waits at a
    prefill worker for a document to be decoded. Best effort has a floor (core/class_floor.py): a document with
    enough credit is first until its blocks are free, if it needs no more than that eighth; a larger one goes once
    they are free.
    """

    def __init__(self, num_blocks: int, can_allocate: CanAllocate, *, floor: float = 0.0) -> None:
        """`floor`: the share of best effort in the blocks while real-time requests wait for some."""
        self._num_blocks = num_blocks
        self._num_kept = int(_KEPT_SHARE * num_blocks)
        self._can_allocate = can_allocate
        self._floor = ClassFloor(floor)
        self._real_time: deque[Reservation] = deque()
        self._best_effort: deque[Reservation] = deque()

    def __len__(self) -> int:
        return len(self._real_time) + len(self._best_effort)

    def add(self, reservation: Reservation) -> None:
        (self._best_effort if reservation.is_best_effort else self._real_time).append(reservation)

    def must_wait(self, reservation: Reservation) -> bool:
        is_behind = bool(self._real_time) or (bool(self._best_effort) and reservation.is_best_effort)
        return is_behind or not self._fits(reservation)

    def take(self) -> Reservation | None:
        if (owed := self._owed()) is not None:
            if self._can_allocate(owed.num_blocks):
                self._floor.note_own(owed.num_blocks)
                return self._best_effort.popleft()
            if owed.num_blocks <= self._num_kept:
                return None
        queue = self._real_time or self._best_effort
        if not queue or not self._fits(queue[0]):
            return None
        taken = queue.popleft()
        if taken.is_best_effort:
            self._floor.note_own(taken.num_blocks)
        elif self._best_effort:
            self._floor.note_earlier(taken.num_blocks, self._best_effort[0].num_blocks)
        return taken

    def latest_attempt(self, request_id: RequestId) -> int:
        waiting = (*self._real_time, *self._best_effort)
        return max((entry.attempt for entry in waiting if entry.request_id == request_id), default=0)

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        self._keep(lambda entry: entry.request_id != request_id or entry.attempt > attempt)

    def forget_worker(self, peer: str) -> None:
        self._keep(lambda entry: entry.worker != peer)

    def _keep(self, is_kept: Callable[[Reservation], bool]) -> None:
        self._real_time = deque(filter(is_kept, self._real_time))
        self._best_effort = deque(filter(is_kept, self._best_effort))

    def _owed(self) -> Reservation | None:
        if not (self._real_time and self._best_effort):
            return None
        first = self._best_effort[0]
        return first if self._floor.is_due(first.num_blocks) else None

    def _fits(self, reservation: Reservation) -> bool:
        num_blocks = reservation.num_blocks
        is_small = num_blocks + self._num_kept <= self._num_blocks  # a larger one would never fit beside what is kept
        return self._can_allocate(num_blocks + (self._num_kept if reservation.is_best_effort and is_small else 0))
