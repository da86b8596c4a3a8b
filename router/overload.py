"""Refuses chats in an overload, so that those which were accepted have their first token in good time.

A gateway gives up a chat that has no token after `gateway.first_token_timeout_s`. Chats on time pass late ones, so in a
lasting overload those that come late wait and wait, until they are given up. So while a chat of the same tenant has
waited for an eighth of `longest_s` or more, a newcomer is refused, with the time after which to come again, if

    waited + tokens / speed > longest_s,    as those that have come would wait too long, or if
    (tokens on time) / speed > ttft  and  waited + (late tokens) / (share * speed) > longest_s,    as it would itself

- waited: by the chat of its tenant that has waited longest for its first token;
- tokens: of prompts that are computed until all chats of its tenant have theirs, its own included. Tenants share by
  weight: a tenant with few of them is not refused because another floods;
- on time, late: of chats whose TTFT has not passed, its own included, and of those that come after these;
- speed: of prompts, in tokens a second, of late, while chats waited;
- share: of it, that late chats have beside those on time.

Example: 90 s, a TTFT of 1 s, 2 500 tokens a second. 30 000 tokens of late chats wait, for 12 s at most, and 3 000 on
time. A newcomer would have its first token after 1.2 s, late, and 12 + 30 000 / 250 s are more than 90: it is refused.
With 1 000 tokens on time it is accepted, as 12 + 31 000 / 2 500 s are not.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import Request
from router.policies.forecast import DrainForecast
from router.state import TrackedRequest

# Of the longest wait: while none has waited for that long nobody is refused, as a burst that has just come is no
# overload, and its speed is not known yet.
LEAST_WAITED = 0.125
LATE_SHARE = 0.1  # of the speed: the floor of a worker, for chats that are overdue


@dataclass(slots=True)
class _Waiting:
    since_s: float
    weight: float
    num_tokens: int = 0  # of their prompts, to compute
    num_late: int = 0  # of these, of chats that are late


class WaitingChats:
    """Knows which chats wait for their first token, by tenant, as of the last tick and with those accepted since."""

    def __init__(self, longest_s: float | None) -> None:
        self._longest_s = longest_s
        self._by_tenant: dict[str, _Waiting] = {}
        self._speed = DrainForecast()
        self._num_computed = 0  # tokens of prompts, as last looked at

    def note(self, requests: Iterable[TrackedRequest], num_computed: int, now: float) -> None:
        """Look at all requests again. `num_computed`: tokens of prompts, since the router began."""
        if self._longest_s is None:
            return
        have_waited, num_new = bool(self._by_tenant), num_computed - self._num_computed
        self._num_computed = num_computed
        self._by_tenant.clear()
        for tracked in requests:
            if _awaits_first_token(tracked):
                self.accepted(tracked, now)
        if not self._by_tenant:
            self._speed.idle()
        elif num_new or not have_waited:  # a prompt counts when it has ended, however long that took
            self._speed.observe(num_new if have_waited else 0, now)

    def accepted(self, tracked: TrackedRequest, now: float) -> None:
        if self._longest_s is None:
            return
        request, num_tokens = tracked.request, tracked.num_prefill_tokens
        own = self._by_tenant.get(request.tenant)
        if own is None:
            own = self._by_tenant[request.tenant] = _Waiting(request.arrival_s, request.weight)
        own.since_s = min(own.since_s, request.arrival_s)
        own.num_tokens += num_tokens
        own.num_late += num_tokens * (tracked.turn_due_s <= now)

    def refused_for_s(self, request: Request, now: float) -> float | None:
        """Return after what time a newcomer is worth another try; None: it is not refused."""
        own, longest_s = self._by_tenant.get(request.tenant), self._longest_s
        if longest_s is None or own is None or (waited_s := now - own.since_s) < LEAST_WAITED * longest_s:
            return None
        share = (own.num_tokens + request.prompt_len) / own.weight  # of each tenant that has as much, by its weight
        others = self._by_tenant.values()
        num_tokens = sum(min(other.num_tokens, share * other.weight) for other in others)
        num_late = sum(min(other.num_late, share * other.weight) for other in others)
        if (speed := self._speed.tokens_per_s) is None:
            return None
        all_s, late_s = (num_tokens + request.prompt_len) / speed, num_late / (LATE_SHARE * speed)
        on_time_s = (num_tokens - num_late + request.prompt_len) / speed
        is_late = request.slo.ttft_s is None or on_time_s > request.slo.ttft_s
        if waited_s + all_s <= longest_s and not (is_late and waited_s + late_s > longest_s):
            return None
        return self._speed.seconds_for(round(num_tokens))


def _awaits_first_token(tracked: TrackedRequest) -> bool:
    has_none = tracked.prefilled_s is None and not tracked.num_emitted
    return tracked.is_real_time and has_none and tracked.stage in (Stage.QUEUED, Stage.PREFILLING)
