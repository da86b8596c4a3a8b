"""What the router decides: admission, the order of prefills, placement, and when a batch is formed for whom.

The life of a request in the router:
1. SubmitRequest: admitted into the bounded queue, or rejected with the time after which to come back.
2. As soon as a worker has room it gets PrefillRequest, in the order of the policy; it emits the first token itself.
3. RequestPooled: the blocks lie in a pool. (A colocated worker keeps the request: PrefillCompleted moves it on.)
4. When a decode worker wants work, the pool is told to form a batch for it: BatchFormed says who is on the way,
   BatchReceived who has arrived.
5. RequestFinished ends it. RequestPreempted sends it back to the queue, to be recomputed.
Whoever holds a request may be lost at any moment. Only the gateway knows which tokens the client has, so the router
asks it (RequestInterrupted) and goes on from its answer (ResumeRequest). The router never sees a token or a block.
"""

from collections.abc import Iterable

from alignedserve.config.sections import RouterConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import Request
from alignedserve.messages.events import CommonEvent, PeerLinked, PeerLost, Received, Send, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import (
    AbortRequest,
    AttemptFailed,
    BatchFormed,
    BatchReceived,
    CopyLost,
    DropRequest,
    FailureKind,
    PoolLoad,
    PoolRegistered,
    PrefillCompleted,
    PrefillRequest,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestPooled,
    RequestPreempted,
    RequestRejected,
    ResumeRequest,
    SubmitRequest,
    WorkerLoad,
    WorkerRegistered,
)
from alignedserve.messages.wire import Message
from router.fleet import Fleet
from router.policies.forecast import DrainForecast, OutputLengthForecast
from router.policies.prefill_order import PrefillOrder
from router.prefill_queue import PrefillQueue
from router.state import TrackedRequest, WorkerRecord
from router.status import Counters, status_of

# Share of a decode worker's blocks that granted, not yet admitted requests may need (design, section 3: max_blocks).
_CANDIDATE_SHARE = 0.4
_TICKS_PER_STATUS = 4


class RouterLogic:
    """Every request that was accepted and is not over, every worker and pool, and the queue between them."""

    def __init__(self, *, config: RouterConfig, order: PrefillOrder) -> None:
        self._config = config
        self._queue = PrefillQueue(order)
        self._requests: dict[RequestId, TrackedRequest] = {}
        self._fleet = Fleet(candidate_requests=config.candidate_requests)
        self._gateways: dict[str, None] = {}
        self._lengths = OutputLengthForecast()
        self._drain = DrainForecast()
        self._counters = Counters()
        self._last_attempt = 0
        self._num_ticks = 0

    def on_event(self, event: CommonEvent, now: float) -> list[Send]:
        """Same state, event and now always give the same commands. Touches nothing outside self."""
        match event:
            case Received(peer, message):
                commands = self._on_message(peer, message, now)
            case PeerLinked(role, peer):
                if role is Role.GATEWAY:
                    self._gateways[peer] = None
                commands = []
            case PeerLost(_, peer):
                commands = self._on_lost(peer)
            case Ticked():
                commands = self._on_tick()
        commands += self._dispatch_prefills(now)
        return commands + [Send(pool, form) for pool, form in self._fleet.batches_to_form()]

    # --- messages

    def _on_message(self, peer: str, message: Message, now: float) -> list[Send]:
        match message:
            case SubmitRequest():
                return self._submit(peer, message.request)
            case ResumeRequest():
                return self._resume(peer, message)
            case AbortRequest():
                return self._abort(message.request_id)
            case WorkerRegistered() | PoolRegistered():
                self._fleet.register(peer, message)
            case PrefillCompleted():
                return self._prefill_completed(peer, message, now)
            case RequestPooled():
                return self._pooled(peer, message)
            case BatchReceived():
                return self._batch_received(peer, message)
            case BatchFormed():
                return self._batch_formed(message)
            case CopyLost():
                return self._copy_lost(message)
            case RequestFinished():
                self._finished(message)
            case RequestPreempted():
                return self._preempted(peer, message)
            case AttemptFailed():
                return self._failed(message)
            case WorkerLoad() | PoolLoad():
                self._fleet.note_load(peer, message)
            case _:
                raise AssertionError(f"the router does not take {type(message).__name__}")
        return []

    def _submit(self, gateway: str, request: Request) -> list[Send]:
        rejection = self._rejection(request)
        if rejection is not None:
            return [Send(gateway, rejection)]
        self._track(gateway, request, ())
        return []

    def _rejection(self, request: Request) -> RequestRejected | RequestFailed | None:
        if request.request_id in self._requests:
            return RequestRejected(request.request_id, "this request is already being served", 0.0)
        if not self._fleet.can_ever_hold(request.max_context_len):
            reason = "its context needs more cache blocks than any worker or pool of this cluster has"
            return RequestFailed(request.request_id, FailureKind.UNSERVABLE, reason)
        is_full = (
            len(self._queue) >= self._config.max_queued_requests
            or self._queue.num_tokens + request.prompt_len > self._config.max_queued_tokens
        )
        if not is_full:
            return None
        retry_after_s = self._drain.seconds_for(self._queue.num_tokens)
        return RequestRejected(request.request_id, "the queue is full", retry_after_s)

    def _track(self, gateway: str, request: Request, generated_token_ids: tuple[int, ...]) -> None:
        tracked = TrackedRequest(request, gateway, self._lengths.predict(request))
        tracked.generated_token_ids = generated_token_ids
        self._requests[request.request_id] = tracked
        self._enqueue(tracked)

    def _enqueue(self, tracked: TrackedRequest) -> None:
        self._queue.push(tracked.request, tracked.num_prefill_tokens)

    def _resume(self, gateway: str, message: ResumeRequest) -> list[Send]:
        request_id = message.request.request_id
        tracked = self._requests.get(request_id)
        if tracked is None:  # accepted by a router before this one, or finished with tokens that never arrived
            self._track(gateway, message.request, message.generated_token_ids)
            return []
        # One that goes on needs nothing, unless it goes on from tokens that a lost worker took with it.
        has_gap = len(message.generated_token_ids) < len(tracked.generated_token_ids)
        if tracked.gateway != gateway or (tracked.stage is not Stage.QUEUED and not has_gap):
            return []
        commands = self._take_back(tracked)
        self._queue.discard(request_id)
        tracked.generated_token_ids = message.generated_token_ids
        self._enqueue(tracked)
        return commands

    def _abort(self, request_id: RequestId) -> list[Send]:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return []
        return self._let_go(tracked, Stage.ABORTED)

    def _current(self, request_id: RequestId, attempt: int) -> TrackedRequest | None:
        """The request, if this attempt at it is the one that goes on; None: what was said of it is stale."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.stage is Stage.QUEUED or tracked.attempt != attempt:
            return None
        return tracked

    def _prefill_completed(self, peer: str, message: PrefillCompleted, now: float) -> list[Send]:
        worker = self._fleet.workers.get(peer)
        tracked = self._current(message.request_id, message.attempt)
        if worker is None or tracked is None or worker.prefilling.pop(message.request_id, None) is None:
            return []
        self._observe_drain(message.num_tokens, now)
        if worker.registered.can_decode:
            self._fleet.note_decoding(tracked, worker)
            return []
        tracked.is_computed = True
        pool = self._fleet.pool_of(peer)
        if pool is not None and pool.life == tracked.pool_life:
            return []
        # The pool was lost meanwhile, perhaps after it had taken the blocks and before its word could reach us.
        return [Send(peer, AbortRequest(message.request_id, message.attempt)), *self._interrupt([tracked])]

    def _observe_drain(self, num_tokens: int, now: float) -> None:
        if len(self._queue):
            self._drain.observe(num_tokens, now)
        else:
            self._drain.idle()

    def _pooled(self, pool: str, message: RequestPooled) -> list[Send]:
        tracked = self._current(message.request_id, message.attempt)
        if tracked is None or tracked.stage is not Stage.PREFILLING or pool not in self._fleet:
            return [Send(pool, DropRequest(message.request_id, message.attempt))]
        self._fleet.note_pooled(tracked, pool)
        return []

    def _batch_formed(self, message: BatchFormed) -> list[Send]:
        worker = self._fleet.workers.get(message.worker)
        is_expected = worker is not None and worker.forming == message.batch_id
        if worker is not None and is_expected and not message.members:
            worker.forming = None
        commands = []
        for tracked in [self._current(request_id, attempt) for request_id, attempt in message.members]:
            if tracked is None or tracked.stage is not Stage.POOLED:
                continue  # it ended, or its worker's word was faster
            if is_expected:
                tracked.granted_to = message.worker
            else:  # granted to a worker that is gone; should its next life get it, it will be told to let go
                commands += self._interrupt([tracked])
        return commands

    def _batch_received(self, peer: str, message: BatchReceived) -> list[Send]:
        worker = self._fleet.workers.get(peer)
        if worker is not None and worker.forming == message.batch_id:
            worker.forming = None
        commands = []
        for request_id, attempt in message.members:
            tracked = self._current(request_id, attempt)
            if tracked is None or tracked.stage not in (Stage.PREFILLING, Stage.POOLED) or worker is None:
                commands.append(Send(peer, AbortRequest(request_id, attempt)))  # it ended on the way
                continue
            self._fleet.note_decoding(tracked, worker)
        return commands

    def _copy_lost(self, message: CopyLost) -> list[Send]:
        tracked = self._current(message.request_id, message.attempt)
        # Had its worker received it, the loss of that worker is dealt with by itself.
        if tracked is None or tracked.stage is Stage.DECODING:
            return []
        worker = self._fleet.workers.get(tracked.granted_to or "")
        if worker is not None:
            worker.forming = None
        return self._interrupt([tracked])

    def _finished(self, message: RequestFinished) -> None:
        tracked = self._current(message.request_id, message.attempt)
        if tracked is not None:
            self._lengths.observe(tracked.request, message.num_generated)
            self._fleet.forget(tracked)
            tracked.move(Stage.FINISHED)
            del self._requests[message.request_id]

    def _preempted(self, peer: str, message: RequestPreempted) -> list[Send]:
        tracked = self._current(message.request_id, message.attempt)
        worker = self._fleet.workers.get(peer)
        if tracked is None or worker is None:
            return []
        # A prefill worker gives up what it offered to a lost pool; whoever has taken it by then goes on with it.
        if not worker.registered.can_decode and tracked.holder != peer:
            return []
        self._counters.count_preemption(is_refused=message.handoff_refused)
        self._fleet.forget(tracked)
        tracked.move(Stage.QUEUED)
        tracked.generated_token_ids = message.generated_token_ids
        tracked.num_requeues += message.handoff_refused
        if tracked.num_requeues > self._config.max_requeues:
            return self._give_up(tracked, FailureKind.INTERNAL, "its cache was refused again and again")
        self._enqueue(tracked)
        return []

    def _failed(self, message: AttemptFailed) -> list[Send]:
        tracked = self._current(message.request_id, message.attempt)
        if tracked is None:
            return []
        return self._give_up(tracked, message.kind, message.reason)

    # --- losses

    def _on_lost(self, peer: str) -> list[Send]:
        self._gateways.pop(peer, None)
        orphans = [tracked for tracked in self._requests.values() if tracked.gateway == peer]
        commands = [command for tracked in orphans for command in self._let_go(tracked, Stage.ABORTED)]
        if peer not in self._fleet:
            return commands
        lost = [tracked for tracked in self._requests.values() if self._fleet.may_have_lost(tracked, peer)]
        commands += self._interrupt(lost)
        self._fleet.remove(peer)
        return commands

    def _interrupt(self, lost: Iterable[TrackedRequest]) -> list[Send]:
        """Take requests back from whoever held them; their gateways say how far they got."""
        commands = []
        for tracked in lost:
            self._fleet.forget(tracked)
            tracked.move(Stage.QUEUED)
            tracked.num_requeues += 1
            if tracked.num_requeues > self._config.max_requeues:
                commands += self._give_up(tracked, FailureKind.WORKER_LOST, "its workers were lost again and again")
            else:
                commands.append(Send(tracked.gateway, RequestInterrupted(tracked.request.request_id)))
        return commands

    def _let_go(self, tracked: TrackedRequest, stage: Stage) -> list[Send]:
        """End a request and tell whoever holds it to free what it holds."""
        commands = self._take_back(tracked)
        self._queue.discard(tracked.request.request_id)
        tracked.move(stage)
        del self._requests[tracked.request.request_id]
        return commands

    def _take_back(self, tracked: TrackedRequest) -> list[Send]:
        """Into the queue's stage (not yet the queue), and tell whoever holds it to let go of this attempt."""
        request_id, attempt, holder, was = tracked.request.request_id, tracked.attempt, tracked.holder, tracked.stage
        if holder is None:
            return []
        self._fleet.forget(tracked)
        tracked.move(Stage.QUEUED)
        if was is Stage.POOLED:
            return [Send(holder, DropRequest(request_id, attempt))]
        # A prefill worker may have handed its blocks over already; the pool is told as well.
        pools = [worker.registered.pool_name for worker in self._fleet.workers.values() if worker.name == holder]
        drops = [Send(pool, DropRequest(request_id, attempt)) for pool in pools if was is Stage.PREFILLING]
        return [Send(holder, AbortRequest(request_id, attempt)), *drops]

    def _give_up(self, tracked: TrackedRequest, kind: FailureKind, reason: str) -> list[Send]:
        failed = RequestFailed(tracked.request.request_id, kind, reason)
        return [*self._let_go(tracked, Stage.FAILED), Send(tracked.gateway, failed)]

    # --- placement

    def _dispatch_prefills(self, now: float) -> list[Send]:
        """Keep every worker that prefills supplied, the least loaded first; the rest waits here, still in order."""
        commands: list[Send] = []
        while (worker := self._fleet.least_loaded_prefiller()) is not None:
            request_id = self._next_prefill_for(worker)
            if request_id is None:
                break
            tracked = self._requests[request_id]
            tracked.move(Stage.PREFILLING, worker.name)
            # At least the time in milliseconds: larger than any that a router before this one gave out.
            self._last_attempt = max(self._last_attempt + 1, int(now * 1000))
            tracked.attempt = self._last_attempt
            pool = self._fleet.pool_of(worker.name)
            tracked.pool_life = pool.life if pool is not None else None
            worker.prefilling[request_id] = tracked.num_prefill_tokens
            message = PrefillRequest(tracked.request, tracked.attempt, tracked.generated_token_ids)
            commands.append(Send(worker.name, message))
        return commands

    def _next_prefill_for(self, worker: WorkerRecord) -> RequestId | None:
        room = self._config.max_prefill_tokens_per_worker - worker.num_prefill_tokens
        # A prompt longer than the whole allowance goes to a worker that has nothing else.
        return self._queue.pop_if(lambda num_tokens: num_tokens <= room or not worker.prefilling)

    # --- status

    def _on_tick(self) -> list[Send]:
        self._fleet.mark_news()  # a pool may know of a worker by now that it did not know before
        self._num_ticks += 1
        if self._num_ticks % _TICKS_PER_STATUS:
            return []
        status = status_of(self._requests.values(), self._fleet, self._counters)
        return [Send(gateway, status) for gateway in self._gateways]
