"""Changes of ownership: requests moving between pools and decode workers, and the copies that pools keep.

Messages of the pool and of the decode worker come over different links, in any order. The attempt number, one step
larger at every handoff, tells which is the later. A message of an epoch that has ended is answered by telling the
sender to release the whole epoch.
"""

from alignedserve.core.ids import WorkerName
from alignedserve.core.lifecycle import Stage, epoch_end
from alignedserve.messages.events import Send
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.pools import BatchFormed, BatchReceived, CopyKept, CopyLost, DropRequest, RequestPooled
from alignedserve.messages.workers import MoveRequest, RequestMoved, RequestStayed
from router.placement import Placement
from router.policies.bypass import Bypass
from router.prediction.late_predictions import tell_holder
from router.request_registry import RequestRegistry
from router.state import TrackedRequest, WorkerRecord


class OwnershipTransitions:
    """Updates the owner of a request from what pools and decode workers report."""

    def __init__(self, *, registry: RequestRegistry, placement: Placement, bypass: Bypass) -> None:
        self._registry = registry
        self._placement = placement
        self._bypass = bypass

    def pooled(self, pool: str, message: RequestPooled, now: float) -> list[Send]:
        tracked = self._registry.current(message.request_id, message.attempt)
        if tracked is None or pool not in self._placement:
            return [Send(pool, DropRequest(message.request_id, epoch_end(message.attempt)))]
        if message.attempt <= tracked.attempt:  # it has moved on from there
            refused = self._record_copy(tracked, pool, message.attempt)
            return refused or [Send(pool, DropRequest(message.request_id, message.attempt))]
        commands = self._registry.drop_copies(tracked) if self._placement.copy_of(tracked) != pool else []
        commands += _acknowledge(tracked)
        tracked.attempt = message.attempt
        tracked.pooled_s = now
        # The last token sent is not in the cache yet.
        tracked.num_emitted = message.context_len + 1 - tracked.request.prompt_len
        self._placement.set_pooled(tracked, pool, message.num_blocks)
        return commands + tell_holder(tracked)

    def batch_formed(self, message: BatchFormed, now: float) -> list[Send]:
        """Take the pool's answer to a FormBatch: the members are on their way to the worker."""
        worker = self._placement.workers.get(message.worker)
        is_expected = worker is not None and worker.pending_batch == message.batch_id
        if worker is not None and is_expected and not message.members:
            self._placement.close_batch_request(worker, is_empty=True, now=now)
        commands = []
        for request_id, attempt in message.members:
            tracked = self._registry.current(request_id, attempt)
            if tracked is None or tracked.attempt >= attempt or tracked.stage is not Stage.POOLED:
                continue  # it has ended, or its worker's message was faster
            if is_expected:
                tracked.destination = message.worker
            else:  # granted to a worker that was lost; if the restarted one gets it, it is told to release it
                commands += self._registry.interrupt([tracked])
        return commands

    def batch_received(self, peer: str, message: BatchReceived, now: float) -> list[Send]:
        worker = self._placement.workers.get(peer)
        if worker is not None and worker.pending_batch == message.batch_id:
            self._placement.close_batch_request(worker, is_empty=False, now=now)
        commands = []
        for request_id, attempt in message.members:
            tracked = self._registry.current(request_id, attempt)
            if tracked is None or worker is None:
                commands.append(Send(peer, AbortRequest(request_id, epoch_end(attempt))))  # it ended in transit
            elif attempt > tracked.attempt:
                if tracked.stage is Stage.POOLED:
                    self._bypass.observe_wait(now - tracked.pooled_s)
                elif message.batch_id == NO_BATCH:
                    self._bypass.observe_bypass()
                    tracked.num_emitted = len(tracked.generated_token_ids) + 1  # emitted by the prefill worker
                commands += _acknowledge(tracked)
                tracked.attempt = attempt
                self._placement.set_decoding(tracked, worker)
                commands += tell_holder(tracked)
                if message.batch_id != NO_BATCH:
                    commands += self._move_copy(tracked, message.pool_name or worker.registered.pool_name)
            elif attempt < tracked.attempt:  # it was sent back at once, and that message was faster
                commands.append(Send(peer, AbortRequest(request_id, attempt)))
        return commands

    def order_move(self, tracked: TrackedRequest, receiver: WorkerRecord) -> list[Send]:
        assert tracked.holder is not None, "moved from nowhere"
        tracked.destination = receiver.name
        tracked.num_moves += 1
        message = MoveRequest(tracked.request.request_id, tracked.attempt, WorkerName(receiver.name))
        return [Send(tracked.holder, message)]

    def call_back(self, tracked: TrackedRequest) -> list[Send]:
        """Tell the worker that was to hand a request over to release it; nothing, if no worker decodes it."""
        if tracked.stage is not Stage.DECODING or tracked.holder is None:
            return []
        return [Send(tracked.holder, AbortRequest(tracked.request.request_id, epoch_end(tracked.attempt)))]

    def moved(self, peer: str, message: RequestMoved) -> list[Send]:
        tracked = self._registry.current(message.request_id, message.attempt)
        worker = self._placement.workers.get(peer)
        if tracked is None or worker is None:
            return [Send(peer, AbortRequest(message.request_id, epoch_end(message.attempt)))]  # it ended in transit
        if message.attempt > tracked.attempt:
            tracked.attempt = message.attempt
            tracked.num_emitted = message.num_generated
            self._placement.set_decoding(tracked, worker)
            return tell_holder(tracked)
        return []

    def stayed(self, message: RequestStayed) -> list[Send]:
        tracked = self._registry.current(message.request_id, message.attempt)
        if tracked is not None and tracked.attempt == message.attempt:
            tracked.destination = None
        return []

    def _move_copy(self, tracked: TrackedRequest, pool: str) -> list[Send]:
        """Record that the request was granted by this pool, if that is news: its own message is still on its way.

        The copy that another pool kept of it, when it left that pool's node, is older.
        """
        if pool not in self._placement.pools or self._placement.copy_of(tracked) == pool:
            return []
        commands = self._registry.drop_copies(tracked)
        self._placement.set_copy(tracked, pool)
        return commands

    def copy_kept(self, pool: str, message: CopyKept) -> list[Send]:
        tracked = self._registry.current(message.request_id, message.attempt)
        if tracked is None or pool not in self._placement:
            return [Send(pool, DropRequest(message.request_id, epoch_end(message.attempt)))]
        return self._record_copy(tracked, pool, message.attempt)

    def _record_copy(self, tracked: TrackedRequest, pool: str, attempt: int) -> list[Send]:
        """Record a copy, or tell the pool to drop it if another pool has one already.

        Only this attempt and earlier ones: the request may be there once more by now, on its way back from a worker.
        """
        if self._placement.copy_of(tracked) not in (None, pool):
            return [Send(pool, DropRequest(tracked.request.request_id, attempt))]
        self._placement.set_copy(tracked, pool)
        return []

    def copy_lost(self, pool: str, message: CopyLost) -> list[Send]:
        """Interrupt a request that was on its way to a worker which the pool has lost.

        The batch is not waited for, even if the request has moved on since: all of it was lost with the link.
        """
        worker = self._placement.workers.get(message.worker)
        if worker is not None and message.batch_id != NO_BATCH and worker.pending_batch == message.batch_id:
            self._placement.cancel_batch_request(worker)
        if message.request_id not in self._registry.requests:
            return [Send(pool, DropRequest(message.request_id, epoch_end(message.attempt)))]
        tracked = self._registry.current(message.request_id, message.attempt)
        if tracked is None or message.attempt < tracked.attempt:
            return []
        if tracked.stage is Stage.DECODING and tracked.holder is not None:
            # The link may be down and not the worker; if it returned the request, that message was lost with the link.
            abort = Send(tracked.holder, AbortRequest(message.request_id, epoch_end(message.attempt)))
            return [abort, *self._registry.interrupt([tracked])]
        return self._registry.interrupt([tracked])


def _acknowledge(tracked: TrackedRequest) -> list[Send]:
    if tracked.stage is not Stage.DECODING or tracked.holder is None:
        return []
    return [Send(tracked.holder, AbortRequest(tracked.request.request_id, tracked.attempt))]
