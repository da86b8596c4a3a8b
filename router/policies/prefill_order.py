"""In which order queued requests go to prefill workers."""

from typing import Protocol

from alignedserve.core.request import Request, RequestClass

OrderKey = tuple[float, ...]

# What a request without an SLO of its own is held to, so that the order is total and nobody starves: a best-effort
# request overtakes real-time ones that arrived this much later than it did.
DEFAULT_TTFT_S = {RequestClass.REAL_TIME: 1.0, RequestClass.BEST_EFFORT: 60.0}
# One step of `priority` is worth this much waiting.
PRIORITY_STEP_S = 10.0


class PrefillOrder(Protocol):
    """Smaller keys go first; ties are broken by arrival and request id. The key of a request never changes."""

    def key(self, request: Request) -> OrderKey:
        """Sort key of a request."""


class FcfsOrder:
    """Order of arrival."""

    def key(self, request: Request) -> OrderKey:
        """See PrefillOrder."""
        return (request.arrival_s,)


class LeastSlackOrder:
    """Least time left to the first-token deadline: `arrival_s + ttft_s + 10 s * priority` (design, section 1, step 3).

    Since all of them lose slack at the same rate, ordering by the deadline is ordering by slack at any moment.
    Example: at 100 s a best-effort document (deadline 160) waits; chat arriving until 158.9 s (deadline 159.9) passes
    it, chat arriving at 159.1 s does not.
    """

    def key(self, request: Request) -> OrderKey:
        """See PrefillOrder."""
        ttft_s = request.slo.ttft_s if request.slo.ttft_s is not None else DEFAULT_TTFT_S[request.request_class]
        return (request.arrival_s + ttft_s + PRIORITY_STEP_S * request.priority,)
