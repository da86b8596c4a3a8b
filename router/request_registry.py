"""The accepted requests that have not ended, and where a request is retried.

`interrupt` takes a request from a holder that was lost; its gateway then tells which tokens the client has, and
`resume_from` queues it again. `requeue` queues a preempted request again. Lost holders and refused handoffs count as
retries, and after `max_retries` the request fails; preemption for lack of memory does not count. A document of hours
may lose more holders than that: when it has come `FORGIVEN_TOKENS` further, earlier ones are forgotten (state.py).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage, epoch_end, is_same_epoch
from alignedserve.messages.events import Send
from alignedserve.messages.fields import FailureKind
from alignedserve.messages.gateways import AbortRequest, RequestFailed, RequestInterrupted
from alignedserve.messages.pools import DropRequest
from router.fair_shares import cost_of
from router.placement import Placement
from router.policies.forecast import DrainForecast, OutputLengthForecast
from router.prediction.late_predictions import expected_len
from router.prefill_queue import PrefillQueue
from router.state import TrackedRequest


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
        """Add a request that is not to be queued yet, as a worker may have it."""
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
        """Take requests from holders that drain; their gateways then tell from where they go on, which is no retry."""
        commands = []
        for tracked in leaving:
            commands += self._revoke(tracked)
            commands.append(Send(tracked.gateway, RequestInterrupted(tracked.request.request_id)))
        return commands

    def resume_from(self, tracked: TrackedRequest, generated_token_ids: tuple[int, ...]) -> list[Send]:
        """Queue a request again, to be recomputed up to these tokens; its holder, if any, releases it.

        One that has lost too many holders without coming further fails.
        """
        tracked.set_generated(generated_token_ids)
        if tracked.num_retries > self._max_retries:
            return self.fail(tracked, FailureKind.WORKER_LOST, "its workers were lost again and again")
        commands = self._revoke(tracked)
        self.queue.discard(tracked.request.request_id)
        self.enqueue(tracked)
        return commands

    def requeue(self, tracked: TrackedRequest, generated_token_ids: tuple[int, ...], *, is_refused: bool) -> list[Send]:
        """Queue a preempted request again. `is_refused`: its cache did not verify, which counts as a retry."""
        commands = self.drop_copies(tracked) if is_refused else []
        self._placement.unassign(tracked)
        tracked.move(Stage.QUEUED)
        tracked.set_generated(generated_token_ids)
        tracked.num_retries += is_refused
        if tracked.num_retries > self._max_retries:
            return commands + self.fail(tracked, FailureKind.INTERNAL, "its cache was refused again and again")
        self.enqueue(tracked)
        return commands

    def take(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Take a request out of the queue for a worker, which computes so many tokens of its prompt, and its answer.

        Its tenant is charged for them once: what is lost and computed again costs nothing.
        """
        self.queue.take(tracked.request.request_id)
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
        """Tell the pool that may keep a copy of the request to drop it."""
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
