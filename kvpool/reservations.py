"""Reservations that wait for free blocks, in the order of their classes.

Real-time requests go first, and best effort leaves an eighth of the blocks to them: a pool full of documents takes a
chat's blocks at once, and so a chat never waits at a prefill worker for a document to be decoded. In an overload chats
wait for blocks all the time. So best effort has a floor of the blocks beside them (core/class_floor.py): a document
that is owed its blocks is first until they are free, if they are no more than that eighth; a larger one goes once they
are.
"""

from collections import deque
from collections.abc import Callable

from alignedserve.core.class_floor import ClassFloor
from alignedserve.core.ids import RequestId
from kvpool.state import Reservation

_KEPT_SHARE = 1 / 8  # of the blocks, from best effort

CanAllocate = Callable[[int], bool]  # whether so many blocks are free, or can be made free


class WaitingReservations:
    """Two queues, each in order of arrival. `can_allocate`: of the pool's blocks as they are when it is called."""

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
        """Remove and return the first reservation; None: there is none, or it has to wait."""
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
