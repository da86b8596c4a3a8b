"""The queue of requests waiting for a prefill worker."""

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass
from router.policies.prefill_order import OrderKey, PrefillOrder


class QueuedPrefill(NamedTuple):
    """One request in the queue, without its identity."""

    num_tokens: int  # to compute
    is_real_time: bool


class PrefillQueue:
    """Priority queue by policy, then arrival, then id. Removal is lazy: an entry whose request has left is skipped."""

    def __init__(self, order: PrefillOrder) -> None:
        self.order = order
        self._heap: list[tuple[OrderKey, float, RequestId]] = []
        self._waiting: dict[RequestId, QueuedPrefill] = {}
        self.num_tokens = 0
        self._num_real_time_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens_until_real_time_is_done(self) -> int:
        """Number of tokens to compute until the last real-time request has its first one; 0: there is none.

        Where real time has an allowance of its own it passes nearly all other work.
        """
        is_apart = self.order.has_real_time_allowance or not self._num_real_time_tokens
        return self._num_real_time_tokens if is_apart else self.num_tokens

    def push(self, request: Request, num_tokens: int) -> None:
        """Add a request with `num_tokens` to compute; it must not be queued already."""
        assert request.request_id not in self._waiting, "a request queued twice"
        queued = QueuedPrefill(num_tokens, request.request_class is RequestClass.REAL_TIME)
        self._waiting[request.request_id] = queued
        self._count(queued, 1)
        heapq.heappush(self._heap, (self.order.key(request), request.arrival_s, request.request_id))

    def num_before(self, request: Request) -> int:
        """Count the requests that go before this one: a look at all of them."""
        key = (self.order.key(request), request.arrival_s, request.request_id)
        return sum(entry < key and entry[2] in self._waiting for entry in self._heap)

    def __iter__(self) -> Iterator[RequestId]:
        """Iterate over the requests, in order of arrival here."""
        return iter(self._waiting)

    def first(self) -> RequestId | None:
        """Return the first request; None: the queue is empty."""
        while self._heap and self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop_if(self, is_wanted: Callable[[QueuedPrefill], bool]) -> RequestId | None:
        """Take the first request if it is wanted, else None; a later request never overtakes it."""
        first = self.first()
        if first is None or not is_wanted(self._waiting[first]):
            return None
        heapq.heappop(self._heap)
        self._count(self._waiting.pop(first), -1)
        return first

    def discard(self, request_id: RequestId) -> None:
        """Remove a request if it is queued."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._count(waiting, -1)

    def _count(self, queued: QueuedPrefill, sign: int) -> None:
        self.num_tokens += sign * queued.num_tokens
        self._num_real_time_tokens += sign * queued.num_tokens * queued.is_real_time
