"""First come, first served: batches in order of arrival, whatever the lengths."""

import heapq

from alignedserve.core.ids import RequestId
from alignedserve.messages.cluster_view import LengthTree
from kvpool.policies.batch_former import AlignedBatch, BatchLimits, LengthRange, batch_of
from kvpool.state import PooledRequest

_Entry = tuple[float, RequestId, int]  # arrival, id, number of the insertion


class FcfsBatchFormer:
    """BatchFormer in order of arrival at the gateway, without overtaking: a request that does not fit ends the batch.

    Example: contexts of 900, 40 and 50 tokens arrive in this order, `max_requests` is 2: the batch is {900, 40}.
    """

    is_aligned = False

    def __init__(self) -> None:
        self._pooled: dict[RequestId, tuple[_Entry, PooledRequest]] = {}
        self._order: list[_Entry] = []  # heap; entries of removed requests are skipped
        self._num_insertions = 0

    def insert(self, pooled: PooledRequest, now: float) -> None:
        assert pooled.request_id not in self._pooled, "a request pooled twice"
        self._num_insertions += 1
        entry = (pooled.arrival_s, pooled.request_id, self._num_insertions)
        self._pooled[pooled.request_id] = (entry, pooled)
        heapq.heappush(self._order, entry)

    def remove(self, request_id: RequestId) -> None:
        del self._pooled[request_id]

    def form(self, limits: BatchLimits, now: float) -> AlignedBatch | None:
        chosen: list[PooledRequest] = []
        examined: list[_Entry] = []
        num_blocks = 0
        while len(chosen) < limits.max_requests and (pooled := self._pop(examined)) is not None:
            num_blocks += pooled.num_blocks
            if num_blocks > limits.max_blocks:
                break
            chosen.append(pooled)
        for entry in examined:
            heapq.heappush(self._order, entry)
        return batch_of(chosen) if chosen else None

    def join(self, lengths: LengthRange, limits: BatchLimits, now: float) -> AlignedBatch | None:
        return None

    def seen(self) -> LengthTree:
        return LengthTree()

    def _pop(self, examined: list[_Entry]) -> PooledRequest | None:
        while self._order:
            entry = heapq.heappop(self._order)
            current = self._pooled.get(entry[1])
            if current is not None and current[0] == entry:
                examined.append(entry)
                return current[1]
        return None
