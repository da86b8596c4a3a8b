"""Requests by turn while several tenants share: as the router's queue gave their prompts out, whatever their lengths.

That order is fair (router/fair_shares.py); another order would give a tenant its share later or earlier. So a batch
takes the first requests by turn up to the first that does not fit, and passes over a request larger than the limit.
Example: prompts of 900, 40 and 44 tokens were given out in this order. A batch of two is {900, 40}, whatever runs.
"""

from operator import attrgetter

from alignedserve.core.ids import RequestId
from alignedserve.messages.cluster_view import LengthTree
from kvpool.policies.batch_former import AlignedBatch, BatchFormer, BatchLimits, LengthRange, batch_of
from kvpool.state import PooledRequest


class TurnBatchFormer:
    """BatchFormer that chooses by turn where its limits say so, and else as another does."""

    def __init__(self, otherwise: BatchFormer) -> None:
        self._otherwise = otherwise
        self.is_aligned = otherwise.is_aligned
        self._waiting: dict[RequestId, PooledRequest] = {}

    def insert(self, pooled: PooledRequest, now: float) -> None:
        self._waiting[pooled.request_id] = pooled
        self._otherwise.insert(pooled, now)

    def remove(self, request_id: RequestId) -> None:
        del self._waiting[request_id]
        self._otherwise.remove(request_id)

    def form(self, limits: BatchLimits, now: float) -> AlignedBatch | None:
        return self._first(limits) if limits.by_turn else self._otherwise.form(limits, now)

    def join(self, lengths: LengthRange, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """By turn, any lengths may join, and none is passed over."""
        return self._first(limits, passes=False) if limits.by_turn else self._otherwise.join(lengths, limits, now)

    def seen(self) -> LengthTree:
        return self._otherwise.seen()

    def _first(self, limits: BatchLimits, *, passes: bool = True) -> AlignedBatch | None:
        chosen: list[PooledRequest] = []
        blocks_left = limits.max_blocks
        for pooled in sorted(self._waiting.values(), key=attrgetter("turn", "arrival_s", "request_id")):
            if passes and pooled.num_blocks > limits.max_blocks:
                continue
            blocks_left -= pooled.num_blocks
            if blocks_left < 0 or len(chosen) >= limits.max_requests:
                break
            chosen.append(pooled)
        return batch_of(chosen, by_turn=True) if chosen else None
