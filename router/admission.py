"""Admission: which requests the router accepts, and after what time a rejected one is worth another try."""

from alignedserve.config.sections import RouterConfig
from alignedserve.core.request import Request
from alignedserve.messages.fields import FailureKind
from alignedserve.messages.gateways import RequestFailed, RequestRejected
from router.overload import WaitingChats
from router.placement import Placement
from router.policies.forecast import DrainForecast
from router.request_registry import RequestRegistry
from router.state import TrackedRequest


class Admission:
    """Knows how full the queue is, how fast it drains, and how long chats wait. Changes no request."""

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
        retry_after_s = self._chats.refused_for_s(request, now) if is_real_time else None
        if retry_after_s is not None:
            return RequestRejected(request.request_id, "those that have come wait too long already", retry_after_s)
        return None

    def observe_queue(self, now: float) -> None:
        """Learn which tokens have left the queue since the last call, at every event.

        What leaves while nothing waits fills places that were free, and says nothing about how fast they get free.
        """
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
        """Look at which chats wait for their first token. `num_computed`: tokens of prompts, since the router began."""
        self._chats.note(self._registry.requests.values(), num_computed, now)

    def real_time_wait_s(self) -> float:
        """Return the forecast wait of the last real-time request in the queue; 0 without any."""
        num_tokens = self._registry.queue.num_tokens_until_real_time_is_done
        return self.drain.seconds_for(num_tokens) if num_tokens else 0.0
