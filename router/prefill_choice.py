"""Chooses the next prompt and the worker that computes it.

The least loaded worker that may have another prompt gets the first of the queue; where loads are about equal, one of
the node of the request's gateway. A worker whose pool has no room for what it has computed comes after all others.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from router.placement import Placement
from router.prefill_queue import QueuedPrefill
from router.request_registry import RequestRegistry
from router.state import TrackedRequest, WorkerRecord


class PrefillChoice:
    """Takes requests out of the queue, one at a time."""

    def __init__(self, *, registry: RequestRegistry, placement: Placement, max_tokens_per_worker: int) -> None:
        self._registry = registry
        self._placement = placement
        self._max_tokens_per_worker = max_tokens_per_worker

    def next(self, gateways: Mapping[str, str]) -> tuple[TrackedRequest, WorkerRecord] | None:
        """Take the next request out of the queue, and return it with its worker; None: no worker can have one now.

        `gateways`: with their nodes.
        """
        first = self._registry.queue.first()
        if first is None:
            return None
        tracked = self._registry.requests[first]
        for worker in self._least_loaded(tracked):
            if self._registry.queue.pop_if(partial(self._has_room, worker)) is not None:
                return tracked, self._near_gateway(tracked, worker, gateways)
        return None

    def _least_loaded(self, tracked: TrackedRequest) -> Iterator[WorkerRecord]:
        """Yield the worker to have this prompt; where it has no room for it, the one that comes after all others."""
        least = self._placement.least_loaded_prefiller(is_real_time=tracked.is_real_time)
        if least is not None:
            yield least
        last = self._placement.least_loaded_prefiller(at_full_pool=True)
        if last is not None:
            yield last

    def _has_room(self, worker: WorkerRecord, queued: QueuedPrefill) -> bool:
        is_apart = queued.is_real_time and self._registry.queue.order.has_real_time_allowance
        return worker.has_room(queued.num_tokens, self._max_tokens_per_worker, is_apart=is_apart)

    def _near_gateway(self, tracked: TrackedRequest, least: WorkerRecord, gateways: Mapping[str, str]) -> WorkerRecord:
        """Return the worker for a request that the least loaded one could take: one near its gateway, or that one."""
        near = self._placement.near_prefiller(
            gateways.get(tracked.gateway, ""), least, is_real_time=tracked.is_real_time
        )
        queued = QueuedPrefill(tracked.num_prefill_tokens, tracked.is_real_time)
        return near if near is not None and self._has_room(near, queued) else least
