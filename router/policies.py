"""The router's policies: the order of queued requests, by class and then by a key, and which requests bypass the
pool."""

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from typing_extensions import override

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Request, RequestClass
from router.state import WorkerRecord

OrderKey = tuple[float, ...]

# Seconds after its arrival within which the first token of a request without an objective is due.
DEFAULT_TTFT_S = {RequestClass.REAL_TIME: 1.0, RequestClass.BEST_EFFORT: 60.0}
# One step of `priority` is worth this much waiting.
PRIORITY_STEP_S = 10.0
# A best-effort request with a deadline further away than this is ordered as if it were this far away.
LONGEST_DEADLINE_S = 600.0


class PrefillOrder(Protocol):
    """Sort key of queued requests: smaller first, ties by arrival and request id. A request's key never changes."""

    knows_classes: bool  # real-time requests go before best-effort ones, whatever their keys (prefill_queue.py)

    def key(self, request: Request) -> OrderKey:
        """Return the sort key of a request, among those of its class where classes are known."""


class FcfsOrder:
    """Order of arrival."""

    knows_classes = False

    def key(self, request: Request) -> OrderKey:
        return (request.arrival_s,)


class FcfsByClassOrder(FcfsOrder):
    """Order of arrival in each class."""

    knows_classes = True


class ShortestPromptOrder:
    """Shortest prompt first in each class."""

    knows_classes = True

    def key(self, request: Request) -> OrderKey:
        return (float(request.prompt_len),)


class DeadlineOrder:
    """Earliest first-token deadline, or without such an objective that of the last token; then those without any."""

    knows_classes = True

    def key(self, request: Request) -> OrderKey:
        within_s = request.slo.ttft_s if request.slo.ttft_s is not None else request.slo.deadline_s
        return (math.inf if within_s is None else request.arrival_s + within_s,)


class LeastSlackOrder:
    """Least time left to the first-token deadline: `arrival_s + ttft_s + 10 s * priority` (design, section 1, step 3).

    Since all of them lose slack at the same rate, ordering by the deadline is ordering by slack at any moment.
    Example: chats that come at 100 s (TTFT 2 s) and at 100.5 s (TTFT 1 s) are due at 102 and 101.5 s: the second goes
    first. A document that came at 10 s waits for both, whatever its deadline.
    """

    knows_classes = True

    def key(self, request: Request) -> OrderKey:
        return (request.arrival_s + first_token_s(request) + PRIORITY_STEP_S * request.priority,)


def first_token_s(request: Request) -> float:
    """Return the seconds after its arrival until a request's first token is due, no later than a deadline for the
    last."""
    slo = request.slo
    if slo.ttft_s is not None:
        return slo.ttft_s
    if slo.deadline_s is None:
        return DEFAULT_TTFT_S[request.request_class]
    if not request.is_real_time:
        return min(slo.deadline_s, LONGEST_DEADLINE_S)
    return min(DEFAULT_TTFT_S[RequestClass.REAL_TIME], slo.deadline_s)


PREFILL_ORDERS: Mapping[str, Callable[[], PrefillOrder]] = MappingProxyType(
    {
        "deadline": DeadlineOrder,
        "fcfs": FcfsOrder,
        "fcfs_classed": FcfsByClassOrder,
        "least_slack": LeastSlackOrder,
        "shortest_prompt": ShortestPromptOrder,
    }
)


def make_prefill_order(name: str) -> PrefillOrder:
    """Return the prefill order of this name. Raises ConfigError listing the valid names."""
    if name not in PREFILL_ORDERS:
        known = ", ".join(sorted(PREFILL_ORDERS))
        raise ConfigError(f"router.prefill_order: unknown order {name!r}; known: {known}")
    return PREFILL_ORDERS[name]()


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
    """Bypasses the pool when its recent waiting time exceeds the request's `tpot_s`.

    AlignedServe trades the wait for a batch against alignment (section 4.4, TTFT). A token SLO bounds that wait
    (design, section 1, step 8): alignment is an objective, the SLO is a constraint.
    Example: requests have lately waited 80 ms in the pool. A request with `tpot_s` 0.05 and 900 tokens goes
    straight to the decode worker with a free slot that runs lengths nearest to 900, of those with up to eight chats
    or, where all have more, of those with the fewest; with `tpot_s` 0.2 it waits for its batch.
    """

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
