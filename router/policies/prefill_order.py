"""The order in which queued requests go to prefill workers."""

from typing import Protocol

from alignedserve.core.request import Request, RequestClass

OrderKey = tuple[float, ...]

# TTFT assumed for a request without an SLO, so that the order is total and no request starves: a best-effort request
# overtakes real-time ones that arrived this much later than it did.
DEFAULT_TTFT_S = {RequestClass.REAL_TIME: 1.0, RequestClass.BEST_EFFORT: 60.0}
# One step of `priority` is worth this much waiting.
PRIORITY_STEP_S = 10.0
# Best-effort work is ordered among itself by deadlines that are at most this far away.
LONGEST_DEADLINE_S = 600.0


class PrefillOrder(Protocol):
    """Sort key of queued requests: smaller first, ties by arrival and request id. A request's key never changes."""

    has_real_time_allowance: bool  # best-effort prompts at a worker do not count against real-time ones

    def key(self, request: Request) -> OrderKey:
        """Return the sort key of a request."""


class FcfsOrder:
    """Order of arrival."""

    has_real_time_allowance = False

    def key(self, request: Request) -> OrderKey:
        """See PrefillOrder."""
        return (request.arrival_s,)


class LeastSlackOrder:
    """Least time left to the first-token deadline: `arrival_s + ttft_s + 10 s * priority` (design, section 1, step 3).

    Since all of them lose slack at the same rate, ordering by the deadline is ordering by slack at any moment.
    Example: at 100 s a best-effort document (deadline 160) waits; chat arriving until 158.9 s (deadline 159.9) passes
    the document, chat arriving at 159.1 s does not.

    A deadline for the last token (lines of batches have one) brings a real-time request's first token no later than
    itself. Best-effort requests it orders among themselves, in the capacity that real time leaves: it is added to the
    60 s, so that none of them is nearer to passing chat than one without a deadline. Example: at 100 s come a line
    that has 300 s and one that has 20 s (460 and 180): the second goes first, and chat until 178.9 s passes it.
    """

    has_real_time_allowance = True

    def key(self, request: Request) -> OrderKey:
        """See PrefillOrder."""
        return (request.arrival_s + first_token_s(request) + PRIORITY_STEP_S * request.priority,)


def first_token_s(request: Request) -> float:
    """Return the seconds after its arrival within which a request's first token is due."""
    slo = request.slo
    if slo.ttft_s is not None:
        return slo.ttft_s
    default_s = DEFAULT_TTFT_S[request.request_class]
    if slo.deadline_s is None:
        return default_s
    if request.request_class is RequestClass.BEST_EFFORT:
        return default_s + min(slo.deadline_s, LONGEST_DEADLINE_S)
    return min(default_s, slo.deadline_s)
