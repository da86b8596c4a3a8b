"""Changes of ownership: requests moving between pools and decode workers, and the copies that pools keep.

Messages of the pool and of the decode worker come over different links, in any order. The attempt number, one step
larger at every handoff, tells which is the later. A message of an epoch that has ended is answered by telling the
sender to release the whole epoch.
"""

from dataclasses import dataclass

from alignedserve.core.ids import RequestId, WorkerName
from alignedserve.core.lifecycle import Stage, epoch_end, is_same_epoch
from alignedserve.messages.events import Send
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.pools import BatchFormed, BatchReceived, CopyKept, CopyLost, DropRequest, RequestPooled
from alignedserve.messages.workers import DecodedRequest, MoveRequest, RequestMoved, RequestStayed
from router.placement import Placement
from router.policies import Bypass
from router.request_registry import RequestRegistry, tell_holder
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
            else:  # granted to a lost worker; a restarted one that gets the request is told to release it
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
        """Record that this pool granted the request, if its own message is still on its way; an older copy elsewhere
        goes."""
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
        if self._placement.copy_of(tracked) not in (None, pool):
            return [Send(pool, DropRequest(tracked.request.request_id, attempt))]
        self._placement.set_copy(tracked, pool)
        return []

    def copy_lost(self, pool: str, message: CopyLost) -> list[Send]:
        """Interrupt a request on its way to a worker that the pool has lost. Its whole batch was lost with the link."""
        worker = self._placement.workers.get(message.worker)
        if worker is not None and message.batch_id != NO_BATCH and worker.pending_batch == message.batch_id:
            self._placement.batch_requests.cancel(worker)
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


_UNCLAIMED_S = 5.0  # many times what links take to come back
_AWAITED_S = 5.0


@dataclass(frozen=True, slots=True)
class _Unclaimed:
    worker: str
    decoded: DecodedRequest
    until_s: float

    def release(self) -> Send:
        return Send(self.worker, AbortRequest(self.decoded.request_id, epoch_end(self.decoded.attempt)))


@dataclass(frozen=True, slots=True)
class _Awaited:
    tracked: TrackedRequest
    holder: str
    until_s: float


class Adoption:
    """Adopts requests that workers go on decoding without a router.

    A worker tells what it decodes when it registers (WorkerRegistered.decoding), a gateway what it waits for and
    from whom (ResumeRequest.holder). They come in any order:
    - - The worker first: the request is *unclaimed* until its gateway resumes it. After a while without, its client
      or gateway has gone, and the worker is told to release it.
    - - The gateway first: the request is *awaited* from the named worker. It is queued when the worker registers
      without it or does not come in time, or when the gateway loses its link to the worker.
    - - Both: the request stays with the worker, under the worker's attempt. If an earlier worker's tokens never
      reached the client, it is computed again.
    """

    def __init__(self, *, registry: RequestRegistry, placement: Placement) -> None:
        self._registry = registry
        self._placement = placement
        self._unclaimed: dict[RequestId, _Unclaimed] = {}
        self._awaited: dict[RequestId, _Awaited] = {}

    def worker_registered(self, worker: WorkerRecord, decoding: tuple[DecodedRequest, ...], now: float) -> list[Send]:
        self.worker_lost(worker.name)
        commands = []
        for decoded in decoding:
            commands += self._found(worker, decoded, now)
        for awaited in [awaited for awaited in self._awaited.values() if awaited.holder == worker.name]:
            self._queue(awaited)
        return commands

    def worker_lost(self, worker: str) -> None:
        self._unclaimed = {key: entry for key, entry in self._unclaimed.items() if entry.worker != worker}

    def resume(self, tracked: TrackedRequest, holder: str, now: float) -> list[Send]:
        """Track a request that the router does not know: adopted, awaited of its holder, or queued."""
        request_id = tracked.request.request_id
        unclaimed = self._unclaimed.pop(request_id, None)
        self._registry.track(tracked)
        commands = []
        if unclaimed is not None:
            if self._adopt(tracked, self._placement.workers[unclaimed.worker], unclaimed.decoded):
                return []
            commands.append(unclaimed.release())
        elif holder and holder not in self._placement.workers:
            self._awaited[request_id] = _Awaited(tracked, holder, now + _AWAITED_S)
            return []
        self._registry.enqueue(tracked)
        return commands

    def await_no_more(self, request_id: RequestId) -> None:
        self._awaited.pop(request_id, None)

    def ended(self, request_id: RequestId) -> list[Send]:
        unclaimed = self._unclaimed.pop(request_id, None)
        return [] if unclaimed is None else [unclaimed.release()]

    def num_at(self, worker: str) -> int:
        unclaimed = sum(entry.worker == worker for entry in self._unclaimed.values())
        return unclaimed + sum(entry.holder == worker for entry in self._awaited.values())

    def tick(self, now: float) -> list[Send]:
        for awaited in [entry for entry in self._awaited.values() if entry.until_s <= now]:
            self._queue(awaited)
        late = [request_id for request_id, entry in self._unclaimed.items() if entry.until_s <= now]
        return [self._unclaimed.pop(request_id).release() for request_id in late]

    def _found(self, worker: WorkerRecord, decoded: DecodedRequest, now: float) -> list[Send]:
        request_id = decoded.request_id
        unclaimed = _Unclaimed(worker.name, decoded, now + _UNCLAIMED_S)
        tracked = self._registry.requests.get(request_id)
        if tracked is not None:
            return [] if self._adopt(tracked, worker, decoded) else [unclaimed.release()]
        other = self._unclaimed.get(request_id)
        if other is not None and other.decoded.attempt >= decoded.attempt:
            return [unclaimed.release()]
        self._unclaimed[request_id] = unclaimed
        return [] if other is None else [other.release()]

    def _adopt(self, tracked: TrackedRequest, worker: WorkerRecord, decoded: DecodedRequest) -> bool:
        is_latest = not tracked.attempt or (
            is_same_epoch(decoded.attempt, tracked.attempt) and decoded.attempt >= tracked.attempt
        )
        if tracked.stage is not Stage.QUEUED or not is_latest or decoded.num_received > tracked.num_emitted:
            return False
        request_id = tracked.request.request_id
        self.await_no_more(request_id)
        self._registry.queue.discard(request_id)
        self._placement.set_decoding(tracked, worker)
        if tracked.adapter:
            self._placement.adapters.use(worker, tracked.adapter)
        tracked.attempt = decoded.attempt
        tracked.generated_token_ids, tracked.num_emitted = (), decoded.num_received
        return True

    def _queue(self, awaited: _Awaited) -> None:
        tracked = awaited.tracked
        request_id = tracked.request.request_id
        del self._awaited[request_id]
        if self._registry.requests.get(request_id) is tracked and tracked.stage is Stage.QUEUED:
            self._registry.enqueue(tracked)
