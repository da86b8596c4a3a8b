"""Admission: which requests the router accepts, and after what time a rejected request is worth another try."""

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.config.sections import RouterConfig
from alignedserve.core.errors import FailureKind
from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import Request
from alignedserve.messages.gateways import RequestFailed, RequestRejected
from router.placement import Placement
from router.request_registry import DrainForecast, RequestRegistry
from router.state import TrackedRequest

# Of the longest wait. A burst that has just come is no overload, and its speed is not known yet.
LEAST_WAITED = 0.125
LATE_SHARE = 0.1  # of the speed: the floor of a worker, for overdue chats


@dataclass(slots=True)
class _Waiting:
    oldest: TrackedRequest
    weight: float
    num_tokens: int = 0  # of their prompts, to compute
    num_late: int = 0  # of these, of chats that are late


class WaitingChats:
    """Chats that wait for their first token, by tenant: as of the last tick, or of the oldest chat's first token, with
    those accepted since.

    A gateway gives up a chat that has no token after `longest_s` (gateway.first_token_timeout_s). Chats on time pass
    late ones, so in a lasting overload late chats wait until they are given up. While a chat of the same tenant has
    waited for an eighth of `longest_s` or more, a newcomer is therefore refused, with the time after which to come
    again, if

        waited + tokens / speed > longest_s,   as accepted chats would wait too long, or if
        (tokens on time) / speed > ttft  and  waited + (late tokens) / (share * speed) > longest_s,  as it would itself

    - - waited: by the chat of its tenant that has waited longest for its first token;
    - - tokens: of prompts computed until all chats of its tenant have theirs, the newcomer included. Tenants share by
      weight: a tenant with few of them is not refused because another floods;
    - - on time: of chats whose TTFT has not passed, the newcomer included; late: of the rest;
    - - speed: of prompts, in tokens a second, of late, while chats waited; share: of it, for late chats beside punctual
      ones.

    Example: 90 s, a TTFT of 1 s, 2 500 tokens a second. 30 000 tokens of late chats wait, for 12 s at most, and 3 000
    on time. A newcomer would have its first token after 1.2 s, late, and 12 + 30 000 / 250 s are more than 90: it is
    refused. With 1 000 tokens on time it is accepted, as 12 + 31 000 / 2 500 s are not.
    """

    def __init__(self, longest_s: float | None) -> None:
        self._longest_s = longest_s
        self._by_tenant: dict[str, _Waiting] = {}
        self._speed = DrainForecast()
        self._num_computed = 0  # tokens of prompts, as last looked at

    def note(self, requests: Iterable[TrackedRequest], num_computed: int, now: float) -> None:
        if self._longest_s is None:
            return
        have_waited, num_new = bool(self._by_tenant), num_computed - self._num_computed
        self._num_computed = num_computed
        self._count(requests, now)
        if not self._by_tenant:
            self._speed.idle()
        elif num_new or not have_waited:  # a prompt counts when it has ended, however long that took
            self._speed.observe(num_new if have_waited else 0, now)

    def _count(self, requests: Iterable[TrackedRequest], now: float) -> None:
        self._by_tenant.clear()
        for tracked in requests:
            if tracked.is_real_time and _waits(tracked):
                self.accepted(tracked, now)

    def accepted(self, tracked: TrackedRequest, now: float) -> None:
        if self._longest_s is None:
            return
        request, num_tokens = tracked.request, tracked.num_prefill_tokens
        waiting = self._by_tenant.get(request.tenant)
        if waiting is None:
            waiting = self._by_tenant[request.tenant] = _Waiting(tracked, request.weight)
        if request.arrival_s < waiting.oldest.request.arrival_s:
            waiting.oldest = tracked
        waiting.num_tokens += num_tokens
        waiting.num_late += num_tokens * (tracked.turn_due_s <= now)

    def refused_for_s(self, request: Request, requests: Iterable[TrackedRequest], now: float) -> float | None:
        """Return after what time a newcomer is worth another try; None: it is not refused. `requests`: all others."""
        retry_after_s = self._refused_for_s(request, now)
        if retry_after_s is not None and not _waits(self._by_tenant[request.tenant].oldest):
            self._count(requests, now)
            return self._refused_for_s(request, now)
        return retry_after_s

    def _refused_for_s(self, request: Request, now: float) -> float | None:
        tenant, longest_s = self._by_tenant.get(request.tenant), self._longest_s
        if longest_s is None or tenant is None:
            return None
        if (waited_s := now - tenant.oldest.request.arrival_s) < LEAST_WAITED * longest_s:
            return None
        share = (tenant.num_tokens + request.prompt_len) / tenant.weight  # by weight
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


def _waits(tracked: TrackedRequest) -> bool:
    has_token = tracked.prefilled_s is not None or tracked.num_emitted > 0
    return not has_token and tracked.stage in (Stage.QUEUED, Stage.PREFILLING)


class QueueAdmission:
    """Decides who may queue, by how full the queue is, how fast it drains and how long chats wait."""

    def __init__(self, *, config: RouterConfig, registry: RequestRegistry, placement: Placement) -> None:
        self._config = config
        self._registry = registry
        self._placement = placement
        self.drain = DrainForecast()  # to be read
        self._num_taken = 0  # tokens that have left the queue, as last looked at
        self._chats = WaitingChats(config.max_real_time_wait_s)

    def rejection(self, request: Request, now: float) -> RequestRejected | RequestFailed | None:
        queue = self._registry.queue
        if request.request_id in self._registry.requests:
            return RequestRejected(request.request_id, "this request is already being served", 0.0)
        if not self._placement.longest_contexts.can_hold(request):
            reason = "its context needs more cache blocks than any worker or pool of this cluster has"
            return RequestFailed(request.request_id, FailureKind.UNSERVABLE, reason)
        # Each class has bounds of its own: documents that wait, however many, take no place of chat.
        is_real_time, config = request.is_real_time, self._config
        held = queue.held(is_real_time=is_real_time)
        most = config.max_queued_requests if is_real_time else config.max_queued_best_effort_requests
        if held.num_requests >= most or held.num_tokens + request.prompt_len > config.max_queued_tokens:
            num_before = queue.num_tokens_until_real_time_is_done if is_real_time else queue.num_tokens
            return RequestRejected(request.request_id, "the queue is full", self.drain.seconds_for(num_before))
        others = self._registry.requests.values()
        retry_after_s = self._chats.refused_for_s(request, others, now) if is_real_time else None
        if retry_after_s is not None:
            return RequestRejected(request.request_id, "those that have come wait too long already", retry_after_s)
        return None

    def observe_queue(self, now: float) -> None:
        """Learn at every event which tokens left the queue: while none waits, only free places are filled."""
        queue = self._registry.queue
        num_tokens, self._num_taken = queue.num_taken_tokens - self._num_taken, queue.num_taken_tokens
        if len(queue):
            self.drain.observe(num_tokens, now)
        else:
            self.drain.idle()

    def accepted(self, tracked: TrackedRequest, now: float) -> None:
        if tracked.is_real_time:
            self._chats.accepted(tracked, now)

    def observe_chats(self, num_computed: int, now: float) -> None:
        self._chats.note(self._registry.requests.values(), num_computed, now)

    def real_time_wait_s(self) -> float:
        num_tokens = self._registry.queue.num_tokens_until_real_time_is_done
        return self.drain.seconds_for(num_tokens) if num_tokens else 0.0
