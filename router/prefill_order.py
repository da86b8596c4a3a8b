"""The order in which queued requests go to prefill workers: by class, where a policy knows classes, then by a key."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Request, RequestClass

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
