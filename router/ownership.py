"""What pools and decode workers say of requests on their way from one to the other, and of the copies that pools keep.

The word of the pool and that of the decode worker come over different links, in any order. The attempt, one step
further at every hand-over, says which is the later. Word of a life that is over is answered by telling the sender to
let go of all of it.
"""

from alignedserve.core.attempts import epoch_end
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.events import Send
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.pools import BatchFormed, BatchReceived, CopyKept, CopyLost, DropRequest, RequestPooled
from router.placement import Placement
from router.policies.bypass import Bypass
from router.request_registry import RequestRegistry
from router.state import TrackedRequest


class OwnershipTransitions:
    """Moves requests between pools and decode workers as it is told of them."""

    def __init__(self, *, registry: RequestRegistry, placement: Placement, bypass: Bypass) -> None:
        self._registry = registry
        self._placement = placement
        self._bypass = bypass

    def pooled(self, pool: str, message: RequestPooled, now: float) -> list[Send]:
        """The request waits in this pool."""
        tracked = self._registry.current(message.request_id, message.attempt)
        if tracked is None or pool not in self._placement:
            return [Send(pool, DropRequest(message.request_id, epoch_end(message.attempt)))]
        if message.attempt <= tracked.attempt:  # it has gone on from there
            return self._record_copy(tracked, pool) or [Send(pool, DropRequest(message.request_id, message.attempt))]
        commands = self._registry.drop_copies(tracked) if self._placement.copy_of(tracked) != pool else []
        commands += _acknowledge(tracked)
        tracked.attempt = message.attempt
        tracked.pooled_s = now
        # The last token that went out is not in the cache yet.
        tracked.num_emitted = message.context_len + 1 - tracked.request.prompt_len
        self._placement.set_pooled(tracked, pool, message.num_blocks)
        return commands

    def batch_formed(self, message: BatchFormed, now: float) -> list[Send]:
        """The pool has answered what was asked for a worker."""
        worker = self._placement.workers.get(message.worker)
        is_expected = worker is not None and worker.pending_batch == message.batch_id
        if worker is not None and is_expected and not message.members:
            self._placement.close_batch_request(worker, is_empty=True, now=now)
        commands = []
        for request_id, attempt in message.members:
            tracked = self._registry.current(request_id, attempt)
            if tracked is None or tracked.attempt >= attempt or tracked.stage is not Stage.POOLED:
                continue  # it ended, or its worker's word was faster
            if is_expected:
                tracked.destination = message.worker
            else:  # granted to a worker that is gone; should its next life get it, it will be told to let go
                commands += self._registry.interrupt([tracked])
        return commands

    def batch_received(self, peer: str, message: BatchReceived, now: float) -> list[Send]:
        """A decode worker has these requests."""
        worker = self._placement.workers.get(peer)
        if worker is not None and worker.pending_batch == message.batch_id:
            self._placement.close_batch_request(worker, is_empty=False, now=now)
        commands = []
        for request_id, attempt in message.members:
            tracked = self._registry.current(request_id, attempt)
            if tracked is None or worker is None:
                commands.append(Send(peer, AbortRequest(request_id, epoch_end(attempt))))  # it ended on the way
            elif attempt > tracked.attempt:
                if tracked.stage is Stage.POOLED:
                    self._bypass.observe_wait(now - tracked.pooled_s)
                elif message.batch_id == NO_BATCH:
                    self._bypass.observe_bypass()
                    tracked.num_emitted = len(tracked.generated_token_ids) + 1  # the prefill worker's
                commands += _acknowledge(tracked)
                tracked.attempt = attempt
                self._placement.set_decoding(tracked, worker)
        return commands

    def copy_kept(self, pool: str, message: CopyKept) -> list[Send]:
        """The pool keeps a copy of a request that went past it."""
        tracked = self._registry.current(message.request_id, message.attempt)
        if tracked is None or pool not in self._placement:
            return [Send(pool, DropRequest(message.request_id, epoch_end(message.attempt)))]
        return self._record_copy(tracked, pool)

    def _record_copy(self, tracked: TrackedRequest, pool: str) -> list[Send]:
        """One copy is enough: where another pool is known to have one, this one lets go of its own."""
        if self._placement.copy_of(tracked) not in (None, pool):
            return [Send(pool, DropRequest(tracked.request.request_id, epoch_end(tracked.attempt)))]
        self._placement.set_copy(tracked, pool)
        return []

    def copy_lost(self, pool: str, message: CopyLost) -> list[Send]:
        """A worker was lost while the request was on its way to it."""
        if message.request_id not in self._registry.requests:
            return [Send(pool, DropRequest(message.request_id, epoch_end(message.attempt)))]
        tracked = self._registry.current(message.request_id, message.attempt)
        if tracked is None or message.attempt < tracked.attempt:
            return []
        if tracked.stage is Stage.DECODING and tracked.holder is not None:
            # The link may be gone and not the worker; if it has returned the request, that word was lost with the link.
            abort = Send(tracked.holder, AbortRequest(message.request_id, epoch_end(message.attempt)))
            return [abort, *self._registry.interrupt([tracked])]
        worker = self._placement.workers.get(tracked.destination or "")
        if worker is not None:
            worker.pending_batch = None
        return self._registry.interrupt([tracked])


def _acknowledge(tracked: TrackedRequest) -> list[Send]:
    """A decode worker that gave the request back answers for it until it hears that somebody else has it."""
    if tracked.stage is not Stage.DECODING or tracked.holder is None:
        return []
    return [Send(tracked.holder, AbortRequest(tracked.request.request_id, tracked.attempt))]
