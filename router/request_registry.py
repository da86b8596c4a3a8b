"""The accepted requests that have not ended, and where a request is retried.

`interrupt` takes a request from a holder that was lost; its gateway then tells which tokens the client has, and
`resume_from` queues it again. `requeue` queues a preempted request again. Lost holders and refused handoffs count as
retries, and after `max_retries` the request fails; preemption for lack of memory does not count. Handoffs that a
worker in trouble refuses within seconds count once. A document of hours may lose more holders than that: when it has
come `FORGIVEN_TOKENS` further, earlier ones are forgotten (state.py).
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from alignedserve.core.errors import FailureKind
from alignedserve.core.fair_shares import cost_of
from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage, epoch_end, is_same_epoch
from alignedserve.core.request import Request, RequestClass
from alignedserve.messages.events import Send
from alignedserve.messages.gateways import AbortRequest, RequestFailed, RequestInterrupted
from alignedserve.messages.pools import DropRequest
from alignedserve.messages.workers import SetPredictedLength
from router.placement import Placement
from router.prefill_queue import PrefillQueue
from router.state import TrackedRequest

_WINDOW = 64.0  # observations that weigh in a running mean
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 120.0
_TROUBLE_S = 2.0  # of a worker without descriptors, say: until then it may refuse a request often
_MEMORY_S = 30.0  # of time with a queue: what was computed longer ago counts for less than 1 / e


class OutputLengthForecast:
    """Running mean of output lengths per request class, capped by the request's own limit."""

    def __init__(self) -> None:
        self._mean: dict[RequestClass, float] = {}

    def predict(self, request: Request) -> float:
        limit = float(request.sampling.max_tokens)
        return min(limit, self._mean.get(request.request_class, limit))

    def observe(self, request: Request, num_generated: int) -> None:
        mean = self._mean.get(request.request_class, float(num_generated))
        self._mean[request.request_class] = mean + (num_generated - mean) / _WINDOW


def doubled_past(expected_len: float, num_generated: int, limit: int) -> float:
    """Double a prediction that was overrun until it is not, up to the limit (ALISE, section 3.2)."""
    while 0.0 < expected_len <= num_generated:
        expected_len *= 2.0
    return min(expected_len, float(limit))


class DrainForecast:
    """Time until a queue of tokens has drained, by the rate at which tokens left it while others waited."""

    def __init__(self) -> None:
        self._num_tokens = self._seconds = 0.0  # computed, and in what time; both fade
        self._last_s: float | None = None

    def observe(self, num_tokens: int, now: float) -> None:
        """Learn that `num_tokens` left since the last call: several at one moment count by their sum."""
        if self._last_s is not None:
            seconds = max(now - self._last_s, 0.0)
            fading = math.exp(-seconds / _MEMORY_S)
            self._num_tokens = fading * self._num_tokens + num_tokens
            self._seconds = fading * self._seconds + seconds
        self._last_s = now

    def idle(self) -> None:
        """Learn that the queue is empty: the next interval says nothing about the rate."""
        self._last_s = None

    def seconds_for(self, num_tokens: int) -> float:
        """Return the predicted seconds for this many tokens, between 1 and 120 s; 1 s while no rate is known."""
        expected_s = self.expected_s(num_tokens)
        return _MIN_RETRY_S if expected_s is None else min(_MAX_RETRY_S, max(_MIN_RETRY_S, expected_s))

    def expected_s(self, num_tokens: float) -> float | None:
        return None if (rate := self.tokens_per_s) is None else num_tokens / rate

    @property
    def tokens_per_s(self) -> float | None:
        return self._num_tokens / self._seconds if self._num_tokens and self._seconds else None


def expected_len(tracked: TrackedRequest, predicted_len: float | None = None) -> float:
    """Return the length predicted on arrival, or this one, doubled until it exceeds what was generated since."""
    if predicted_len is None:
        predicted_len = tracked.predicted_output_len
    return doubled_past(predicted_len, len(tracked.generated_token_ids), tracked.request.sampling.max_tokens)


def note_prediction(tracked: TrackedRequest, predicted_len: float) -> list[Send]:
    tracked.predicted_output_len = min(predicted_len, float(tracked.request.sampling.max_tokens))
    tracked.is_length_predicted = True
    tracked.is_prediction_late = tracked.holder is not None
    return tell_holder(tracked)


def tell_holder(tracked: TrackedRequest) -> list[Send]:
    """Tell a late prediction again to every later holder of its dispatch: it may have passed the request on without."""
    if not tracked.is_prediction_late or tracked.holder is None:
        return []
    return [
        Send(tracked.holder, SetPredictedLength(tracked.request.request_id, tracked.attempt, expected_len(tracked)))
    ]


class RequestRegistry:
    """Every accepted request by id, and the queue of those waiting for a prefill worker.

    Whatever takes a request from its holder (the worker or pool that has it) returns the commands that tell the holder.
    """

    def __init__(self, *, placement: Placement, queue: PrefillQueue, max_retries: int) -> None:
        self.requests: dict[RequestId, TrackedRequest] = {}
        self.queue = queue
        self.lengths = OutputLengthForecast()  # of what finishes here
        self._placement = placement
        self._max_retries = max_retries

    def accept(self, tracked: TrackedRequest) -> None:
        self.track(tracked)
        self.enqueue(tracked)

    def track(self, tracked: TrackedRequest) -> None:
        self.requests[tracked.request.request_id] = tracked

    def current(self, request_id: RequestId, attempt: int) -> TrackedRequest | None:
        """Return the request if `attempt` belongs to its current epoch; None: the message is stale."""
        tracked = self.requests.get(request_id)
        if tracked is None or tracked.stage is Stage.QUEUED or not is_same_epoch(tracked.attempt, attempt):
            return None
        return tracked

    def interrupt(self, lost: Iterable[TrackedRequest]) -> list[Send]:
        commands = []
        for tracked in lost:
            self._placement.unassign(tracked)
            tracked.move(Stage.QUEUED)
            tracked.num_retries += 1  # too many or not: that depends on how far it has come
            commands.append(Send(tracked.gateway, RequestInterrupted(tracked.request.request_id)))
        return commands

    def move(self, leaving: Iterable[TrackedRequest]) -> list[Send]:
        commands = []
        for tracked in leaving:
            commands += self._revoke(tracked)
            commands.append(Send(tracked.gateway, RequestInterrupted(tracked.request.request_id)))
        return commands

    def resume_from(self, tracked: TrackedRequest, generated_token_ids: tuple[int, ...]) -> list[Send]:
        """Queue a request again, to be recomputed up to these tokens, or fail it after too many losses."""
        tracked.set_generated(generated_token_ids)
        if tracked.num_retries > self._max_retries:
            return self.fail(tracked, FailureKind.WORKER_LOST, "its workers were lost again and again")
        commands = self._revoke(tracked)
        self.queue.discard(tracked.request.request_id)
        self.enqueue(tracked)
        return commands

    def requeue(
        self, tracked: TrackedRequest, generated_token_ids: tuple[int, ...], now: float, *, is_refused: bool
    ) -> list[Send]:
        """Queue a preempted request again. `is_refused`: its cache did not verify, or could not be copied."""
        commands = self.drop_copies(tracked) if is_refused else []
        self._placement.unassign(tracked)
        tracked.move(Stage.QUEUED)
        tracked.set_generated(generated_token_ids)
        if is_refused and now >= tracked.refused_s + _TROUBLE_S:
            tracked.num_retries, tracked.refused_s = tracked.num_retries + 1, now
        if tracked.num_retries > self._max_retries:
            return commands + self.fail(tracked, FailureKind.INTERNAL, "its cache was refused again and again")
        self.enqueue(tracked)
        return commands

    def take(self, tracked: TrackedRequest, num_tokens: int, now: float) -> None:
        """Take a request out of the queue; charge its tenant once for so many tokens of its prompt, and its answer."""
        self.queue.take(tracked.request.request_id, now)
        tracked.has_been_taken = True
        if tracked.charged_len is None:
            # Without a prediction of its own, the mean by now, and not that of its arrival: the same for all tenants.
            mean = None if tracked.is_length_predicted else self.lengths.predict(tracked.request)
            tracked.charged_len = expected_len(tracked, mean)
            self.queue.charge(tracked.request, cost_of(num_tokens, tracked.charged_len - tracked.num_emitted))

    def finish(self, tracked: TrackedRequest, num_generated: int) -> list[Send]:
        self.lengths.observe(tracked.request, num_generated)
        if tracked.charged_len is not None:
            self.queue.charge(tracked.request, cost_of(0, num_generated - tracked.charged_len))
        self._release(tracked)
        dropped = self.drop_copies(tracked)
        self._placement.unassign(tracked)
        tracked.move(Stage.FINISHED)
        del self.requests[tracked.request.request_id]
        return dropped

    def abort(self, tracked: TrackedRequest) -> list[Send]:
        return self._end(tracked, Stage.ABORTED)

    def fail(self, tracked: TrackedRequest, kind: FailureKind, reason: str) -> list[Send]:
        failed = RequestFailed(tracked.request.request_id, kind, reason)
        return [*self._end(tracked, Stage.FAILED), Send(tracked.gateway, failed)]

    def drop_copies(self, tracked: TrackedRequest) -> list[Send]:
        pool, tracked.copy_at = self._placement.copy_of(tracked), None
        if pool is None:
            return []
        return [Send(pool, DropRequest(tracked.request.request_id, epoch_end(tracked.attempt)))]

    def enqueue(self, tracked: TrackedRequest) -> None:
        self._release(tracked)
        num_left = max(tracked.predicted_output_len - tracked.num_emitted, 1.0)
        self.queue.push(tracked.request, tracked.num_prefill_tokens, tracked.turn_due_s, num_answer_tokens=num_left)

    def _release(self, tracked: TrackedRequest) -> None:
        if tracked.has_been_taken:
            tracked.has_been_taken = False
            self.queue.release(tracked.request)

    def _end(self, tracked: TrackedRequest, stage: Stage) -> list[Send]:
        self._release(tracked)
        commands = self._revoke(tracked)
        commands += [drop for drop in self.drop_copies(tracked) if drop not in commands]
        self.queue.discard(tracked.request.request_id)
        tracked.move(stage)
        del self.requests[tracked.request.request_id]
        return commands

    def _revoke(self, tracked: TrackedRequest) -> list[Send]:
        request_id, holder, was = tracked.request.request_id, tracked.holder, tracked.stage
        if holder is None:
            return []
        attempt = epoch_end(tracked.attempt)
        self._placement.unassign(tracked)
        tracked.move(Stage.QUEUED)
        if was is Stage.POOLED:
            return [Send(holder, DropRequest(request_id, attempt))]
        # A prefill worker may have handed its blocks over already; the pool is told as well.
        commands = [Send(holder, AbortRequest(request_id, attempt))]
        worker = self._placement.workers.get(holder)
        if was is Stage.PREFILLING and worker is not None:
            commands.append(Send(worker.registered.pool_name, DropRequest(request_id, attempt)))
        return commands


class RouterRecords(NamedTuple):
    """What the router knows, to be read."""

    registry: RequestRegistry
    placement: Placement
    gateways: Mapping[str, str]  # that are connected, and their nodes
    drain: DrainForecast  # of the queue
