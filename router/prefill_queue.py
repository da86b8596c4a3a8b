"""The queue of requests that wait for a prefill worker."""

import heapq
from collections.abc import Callable

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from router.policies.prefill_order import OrderKey, PrefillOrder


class PrefillQueue:
    """Ordered by policy, then arrival, then id. Removal is lazy: an entry whose request left is skipped."""

    def __init__(self, order: PrefillOrder) -> None:
        self._order = order
        self._heap: list[tuple[OrderKey, float, RequestId]] = []
        self._num_tokens_of: dict[RequestId, int] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._num_tokens_of)

    def push(self, request: Request, num_tokens: int) -> None:
        """Add a request that has `num_tokens` to compute; it must not be queued already."""
        assert request.request_id not in self._num_tokens_of, "a request queued twice"
        self._num_tokens_of[request.request_id] = num_tokens
        self.num_tokens += num_tokens
        heapq.heappush(self._heap, (self._order.key(request), request.arrival_s, request.request_id))

    def pop_if(self, is_wanted: Callable[[int], bool]) -> RequestId | None:
        """Take the first request if its number of tokens is wanted, else None: nobody overtakes."""
        while self._heap and self._heap[0][2] not in self._num_tokens_of:
            heapq.heappop(self._heap)
        if not self._heap or not is_wanted(self._num_tokens_of[self._heap[0][2]]):
            return None
        request_id = heapq.heappop(self._heap)[2]
        self.num_tokens -= self._num_tokens_of.pop(request_id)
        return request_id

    def discard(self, request_id: RequestId) -> None:
        """Remove a request if it is queued."""
        self.num_tokens -= self._num_tokens_of.pop(request_id, 0)
