"""Who skips the pool: real-time requests whose next token would be late if they waited for an aligned batch.

AlignedServe trades the wait for a batch against alignment (section 4.4, TTFT); for a request with a token SLO that wait
is bounded (design, section 1, step 8): alignment is an objective, the SLO is a constraint.

Example: requests have lately waited 80 ms in the pool. A request with `tpot_s` 0.05 and 900 tokens goes straight to
whichever decode worker with a free place runs lengths nearest to 900; one with `tpot_s` 0.2 waits for its batch.
"""

from collections.abc import Iterable
from typing import Protocol

from alignedserve.core.request import Request, RequestClass
from router.state import WorkerRecord

_WEIGHT = 1 / 16  # of the latest wait in the running mean
_FADING = 1 / 64  # with every request that goes past the pool


class Bypass(Protocol):
    """Says who goes past the pool."""

    def observe_wait(self, wait_s: float) -> None:
        """A request waited so long between entering the pool and reaching a decode worker."""

    def observe_bypass(self) -> None:
        """A request went past the pool."""

    def target(self, request: Request, context_len: int, workers: Iterable[WorkerRecord]) -> WorkerRecord | None:
        """The decode worker that this request should go to past the pool; None: it can wait, or nobody has a place."""


class DirectHandoff:
    """Everybody goes past the pool while any decode worker has a place: disaggregation without a pool (DistServe)."""

    def observe_wait(self, wait_s: float) -> None:
        """See Bypass. Only who finds no place waits, and that says nothing about the next."""

    def observe_bypass(self) -> None:
        """See Bypass."""

    def target(self, request: Request, context_len: int, workers: Iterable[WorkerRecord]) -> WorkerRecord | None:
        """The worker with the fewest requests; ties go by name."""
        able = [worker for worker in workers if _has_free_slot(worker)]
        return min(able, key=lambda worker: (len(worker.decoding), worker.name), default=None)


class UrgentBypass:
    """Learns how long requests wait in the pool and names the worker for one that cannot."""

    def __init__(self) -> None:
        self._expected_wait_s = 0.0

    def observe_wait(self, wait_s: float) -> None:
        """A request waited so long between entering the pool and reaching a decode worker."""
        self._expected_wait_s += (wait_s - self._expected_wait_s) * _WEIGHT

    def observe_bypass(self) -> None:
        """A request went past the pool. What is expected there fades, or nobody would see that it has become less."""
        self._expected_wait_s *= 1 - _FADING

    def target(self, request: Request, context_len: int, workers: Iterable[WorkerRecord]) -> WorkerRecord | None:
        """The decode worker that this request should go to past the pool; None: it can wait, or nobody has a place."""
        tpot_s = request.slo.tpot_s
        if request.request_class is not RequestClass.REAL_TIME or tpot_s is None or self._expected_wait_s <= tpot_s:
            return None
        able = [worker for worker in workers if _has_free_slot(worker)]
        return min(able, key=lambda worker: (_distance(worker, context_len), worker.name), default=None)


def _has_free_slot(worker: WorkerRecord) -> bool:
    registered = worker.registered
    return (
        registered.can_decode and not registered.can_prefill and len(worker.decoding) < registered.max_running_requests
    )


def _distance(worker: WorkerRecord, context_len: int) -> int:
    """Tokens between this length and the running ones; 0 within them, or when nothing of one length runs."""
    running = worker.load.running if worker.load is not None else None
    if running is None:
        return 0
    return max(running.start - context_len, context_len - running.stop + 1, 0)
