"""The requests that were accepted and are not over: who has each, and how one is taken back, queued again or ended."""

from collections.abc import Iterable

from alignedserve.core.attempts import epoch_end, is_same_epoch
from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.events import Send
from alignedserve.messages.fields import FailureKind
from alignedserve.messages.gateways import AbortRequest, RequestFailed, RequestInterrupted
from alignedserve.messages.pools import DropRequest
from router.placement import Placement
from router.prefill_queue import PrefillQueue
from router.state import TrackedRequest


class RequestRegistry:
    """Every accepted request by id, and the queue of those that wait. Tells whoever holds one to let go of it."""

    def __init__(self, *, placement: Placement, queue: PrefillQueue, max_retries: int) -> None:
        self.requests: dict[RequestId, TrackedRequest] = {}
        self.queue = queue
        self._placement = placement
        self._max_retries = max_retries

    def accept(self, tracked: TrackedRequest) -> None:
        """It is ours from now on, and waits."""
        self.requests[tracked.request.request_id] = tracked
        self.enqueue(tracked)

    def enqueue(self, tracked: TrackedRequest) -> None:
        """It waits for a prefill worker."""
        self.queue.push(tracked.request, tracked.num_prefill_tokens)

    def current(self, request_id: RequestId, attempt: int) -> TrackedRequest | None:
        """The request, if this is said of the life of it that goes on; None: that life is over."""
        tracked = self.requests.get(request_id)
        if tracked is None or tracked.stage is Stage.QUEUED or not is_same_epoch(tracked.attempt, attempt):
            return None
        return tracked

    def interrupt(self, lost: Iterable[TrackedRequest]) -> list[Send]:
        """Take requests back from whoever held them; their gateways say how far they got."""
        commands = []
        for tracked in lost:
            self._placement.unassign(tracked)
            tracked.move(Stage.QUEUED)
            tracked.num_requeues += 1
            if tracked.num_requeues > self._max_retries:
                commands += self.fail(tracked, FailureKind.WORKER_LOST, "its workers were lost again and again")
            else:
                commands.append(Send(tracked.gateway, RequestInterrupted(tracked.request.request_id)))
        return commands

    def requeue(self, tracked: TrackedRequest, generated_token_ids: tuple[int, ...], *, is_refused: bool) -> list[Send]:
        """Its worker gave it up: it is queued again, but not when its cache was refused too often."""
        commands = self.drop_copies(tracked) if is_refused else []
        self._placement.unassign(tracked)
        tracked.move(Stage.QUEUED)
        tracked.generated_token_ids = generated_token_ids
        tracked.num_emitted = len(generated_token_ids)
        tracked.num_requeues += is_refused
        if tracked.num_requeues > self._max_retries:
            return commands + self.fail(tracked, FailureKind.INTERNAL, "its cache was refused again and again")
        self.enqueue(tracked)
        return commands

    def resume_from(self, tracked: TrackedRequest, generated_token_ids: tuple[int, ...]) -> list[Send]:
        """Whoever has it lets go, and it waits to be computed again from these tokens."""
        commands = self._revoke(tracked)
        self.queue.discard(tracked.request.request_id)
        tracked.generated_token_ids = generated_token_ids
        tracked.num_emitted = len(generated_token_ids)
        self.enqueue(tracked)
        return commands

    def finish(self, tracked: TrackedRequest) -> list[Send]:
        """Its worker has ended it."""
        dropped = self.drop_copies(tracked)
        self._placement.unassign(tracked)
        tracked.move(Stage.FINISHED)
        del self.requests[tracked.request.request_id]
        return dropped

    def let_go(self, tracked: TrackedRequest, stage: Stage) -> list[Send]:
        """End a request and tell whoever holds it to free what it holds."""
        commands = self._revoke(tracked)
        commands += [drop for drop in self.drop_copies(tracked) if drop not in commands]
        self.queue.discard(tracked.request.request_id)
        tracked.move(stage)
        del self.requests[tracked.request.request_id]
        return commands

    def fail(self, tracked: TrackedRequest, kind: FailureKind, reason: str) -> list[Send]:
        """End a request as failed."""
        failed = RequestFailed(tracked.request.request_id, kind, reason)
        return [*self.let_go(tracked, Stage.FAILED), Send(tracked.gateway, failed)]

    def drop_copies(self, tracked: TrackedRequest) -> list[Send]:
        """The pool keeps a copy of what a worker has: not any longer."""
        pool, tracked.copy_at = self._placement.copy_of(tracked), None
        if pool is None:
            return []
        return [Send(pool, DropRequest(tracked.request.request_id, epoch_end(tracked.attempt)))]

    def _revoke(self, tracked: TrackedRequest) -> list[Send]:
        """Into the queue's stage (not yet the queue), and tell whoever holds it to let go of this attempt."""
        request_id, holder, was = tracked.request.request_id, tracked.holder, tracked.stage
        if holder is None:
            return []
        attempt = epoch_end(tracked.attempt)
        self._placement.unassign(tracked)
        tracked.move(Stage.QUEUED)
        if was is Stage.POOLED:
            return [Send(holder, DropRequest(request_id, attempt))]
        # A prefill worker may have handed its blocks over already; the pool is told as well.
        pools = [worker.registered.pool_name for worker in self._placement.workers.values() if worker.name == holder]
        drops = [Send(pool, DropRequest(request_id, attempt)) for pool in pools if was is Stage.PREFILLING]
        return [Send(holder, AbortRequest(request_id, attempt)), *drops]
