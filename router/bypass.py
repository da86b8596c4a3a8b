"""Bypass of the pool: real-time requests whose next token would be late if they waited for an aligned batch.

AlignedServe trades the wait for a batch against alignment (section 4.4, TTFT); for a request with a token SLO that wait
is bounded (design, section 1, step 8): alignment is an objective, the SLO is a constraint.

Example: requests have lately waited 80 ms in the pool. A request with `tpot_s` 0.05 and 900 tokens goes straight to the
decode worker with a free slot that runs lengths nearest to 900, of those with up to eight chats or, where all have
more, of those with the fewest; with `tpot_s` 0.2 it waits for its batch.
"""

from collections.abc import Iterable
from typing import Protocol

from typing_extensions import override

from alignedserve.core.request import Request
from router.state import WorkerRecord

_WEIGHT = 1 / 16  # of the latest wait, where it is shorter than expected; a longer one is expected at once
_FADING = 1 / 64  # with every request that bypasses the pool
_TOGETHER = 8  # chats that a worker has before others get more: while they are few, the iterations of others stay long


class Bypass(Protocol):
    """Chooses the requests that bypass the pool."""

    def observe_wait(self, wait_s: float) -> None: ...

    def observe_waiting(self, wait_s: float) -> None: ...

    def observe_bypass(self) -> None: ...

    def target(self, request: Request, context_len: int, workers: Iterable[WorkerRecord]) -> WorkerRecord | None:
        """Return the decode worker for a request that bypasses the pool; None: it can wait, or no worker has a slot."""


class DirectHandoff:
    """Lets every request bypass the pool while a decode worker has a free slot: no pool, as in DistServe."""

    def observe_wait(self, wait_s: float) -> None:
        """Only a request that finds no slot waits, which says nothing about the next one."""

    def observe_waiting(self, wait_s: float) -> None: ...

    def observe_bypass(self) -> None: ...

    def target(self, request: Request, context_len: int, workers: Iterable[WorkerRecord]) -> WorkerRecord | None:
        able = [worker for worker in workers if worker.has_free_slot]
        return min(able, key=lambda worker: (worker.num_decoding, worker.name), default=None)


class UrgentBypass:
    """Bypasses the pool when its recent waiting time exceeds the request's `tpot_s`."""

    def __init__(self) -> None:
        self._expected_wait_s = 0.0

    def observe_wait(self, wait_s: float) -> None:
        shorter_s = self._expected_wait_s + (wait_s - self._expected_wait_s) * _WEIGHT
        self._expected_wait_s = max(wait_s, shorter_s)

    def observe_waiting(self, wait_s: float) -> None:
        """A pool full of documents shows before the first of them has left it."""
        self._expected_wait_s = max(wait_s, self._expected_wait_s)

    def observe_bypass(self) -> None:
        """The expected wait fades, as with no request waiting a shorter one would never be observed."""
        self._expected_wait_s *= 1 - _FADING

    def target(self, request: Request, context_len: int, workers: Iterable[WorkerRecord]) -> WorkerRecord | None:
        """Choose a worker with a free slot and few chats; of equals, the one whose running lengths are nearest.

        By lengths alone all would go to one worker until it is full.
        """
        tpot_s = request.slo.tpot_s
        if not request.is_real_time or tpot_s is None or self._expected_wait_s <= tpot_s:
            return None
        able = [worker for worker in workers if worker.has_real_time_slot]
        return min(able, key=lambda worker: _order_of(worker, context_len), default=None)


class PackedBypass(UrgentBypass):
    """Lets requests with a TPOT objective go straight to the decode worker with most room, where slack is packed.

    Their prompts have waited until some have room (prefill_choice.is_decoded_soon). While a worker keeps lengths
    apart, it is an UrgentBypass.
    """

    @override
    def target(self, request: Request, context_len: int, workers: Iterable[WorkerRecord]) -> WorkerRecord | None:
        known = list(workers)
        if not all(worker.takes_any_length for worker in known):
            return super().target(request, context_len, known)
        if not request.is_real_time or request.slo.tpot_s is None:
            return None
        able = [worker for worker in known if worker.has_real_time_slot]
        return min(able, key=lambda worker: (not worker.has_free_slot, -worker.room, worker.name), default=None)


def _order_of(worker: WorkerRecord, context_len: int) -> tuple[bool, int, int, str]:
    together = max(min(_TOGETHER, worker.registered.max_running_requests // 4), 1)
    beyond = max(worker.num_chats + 1 - together, 0)
    return (not worker.has_free_slot, beyond, _distance(worker, context_len), worker.name)


def _distance(worker: WorkerRecord, context_len: int) -> int:
    running = worker.load.running if worker.load is not None else None
    if running is None:
        return 0
    return max(running.start - context_len, context_len - running.stop + 1, 0)
