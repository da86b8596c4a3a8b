"""Decides admission, the order of prefills, placement, and when a batch is formed for which decode worker.

The life of a request in the router:
1. SubmitRequest: admitted to the bounded queue, or rejected with the time after which to retry.
2. A worker with free capacity gets PrefillRequest, in the order of the policy; it emits the first token itself.
3. RequestPooled: the blocks are in a pool. (A colocated worker keeps the request: PrefillCompleted moves it on.)
4. When a decode worker needs work, the pool gets FormBatch: BatchFormed names the requests on their way,
   BatchReceived those that have arrived.
   An urgent request goes straight from its prefill worker to a decode worker, and only a copy of it to the pool.
5. LengthPredicted gives the expected output length. Nothing waits for it: a request dispatched earlier carries the mean
   of its class, and those that hold it get SetPredictedLength (request_registry.py).
6. RequestFinished ends it and drops the pool's copy. Before that, a decode worker may return it to the pool
   (RequestPooled again), or RequestPreempted sends it back to the queue, to be recomputed from the pool's copy.
A router that is new knows no request: what workers decode meanwhile goes on there (ownership.py).
The holder of a request may be lost at any moment. Only the gateway knows which tokens the client has, so the router
asks it (RequestInterrupted) and resumes from its answer (ResumeRequest): see request_registry.py. DrainRequested moves
requests in the same way, while their holder still lives. The router never sees a token or a block.
"""

from collections.abc import Iterable

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.core.ids import RequestId, WorkerName
from alignedserve.core.lifecycle import Stage, beyond_unreported, is_report_due, next_epoch
from alignedserve.core.request import Request
from alignedserve.messages.events import CommonEvent, PeerConnected, PeerDisconnected, Received, Send, Ticked
from alignedserve.messages.gateways import AbortRequest, GatewayRegistered, ResumeRequest, SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import (
    BatchFormed,
    BatchReceived,
    CopyKept,
    CopyLost,
    PoolLoad,
    PoolRegistered,
    RequestPooled,
)
from alignedserve.messages.prefixes import PrefixBlocksChanged
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import (
    AttemptFailed,
    BlocksFetched,
    IterationLogReport,
    PrefillCompleted,
    PrefillRequest,
    RegistrationRefused,
    RequestFinished,
    RequestMoved,
    RequestPreempted,
    RequestStayed,
    WorkerLoad,
    WorkerRegistered,
)
from router.admission import QueueAdmission
from router.leans import FarLeans, Leans
from router.ownership import Adoption, OwnershipTransitions
from router.peer_announcements import announce_all, announce_prefiller, need_pool, need_prefiller, need_receiver
from router.placement import Placement
from router.policies import Bypass, DirectHandoff, PackedBypass, PrefillOrder, UrgentBypass, make_prefill_order
from router.prefill_choice import PrefillChoice
from router.prefill_queue import PrefillQueue
from router.request_registry import RequestRegistry, RouterRecords, expected_len, note_prediction
from router.state import DrainRequested, LengthPredicted, TrackedRequest, WorkerRecord, dispatched
from router.status import QueueForecast, RouterCounters, status_of

RouterEvent = CommonEvent | LengthPredicted | DrainRequested

_TICKS_PER_STATUS = 4


class RouterLogic:
    """The router's state machine over accepted requests, workers, pools and the prefill queue."""

    def __init__(
        self, *, config: RouterConfig, placement: Placement, order: PrefillOrder, bypass: Bypass, leans: Leans
    ) -> None:
        self._placement = placement
        queue = PrefillQueue(order, floor=config.best_effort_floor)
        self._registry = RequestRegistry(placement=placement, queue=queue, max_retries=config.max_retries)
        self._prefill_choice = PrefillChoice(
            registry=self._registry, placement=placement, max_tokens_per_worker=config.max_prefill_tokens_per_worker
        )
        self._gateways: dict[str, str] = {}  # those that are connected, and their nodes
        self._admission = QueueAdmission(config=config, registry=self._registry, placement=placement)
        self._bypass = bypass
        self._leans = leans
        self._ownership = OwnershipTransitions(registry=self._registry, placement=self._placement, bypass=self._bypass)
        self._adoption = Adoption(registry=self._registry, placement=placement)
        self._counters = RouterCounters()
        self._last_attempt = self._reported_attempt = 0
        self._num_ticks = 0
        self._has_joined = False  # since the last report: a gateway that waits to be ready is told at the next tick

    def on_event(self, event: RouterEvent, now: float) -> list[Send]:
        """Return the commands that follow; the same state, event and now always give the same. Touches only self."""
        if not isinstance(event, Received):
            commands = self._on_other(event, now)
        elif isinstance(event.message, PoolLoad):  # changes no decision, and is frequent
            self._placement.update_load(event.peer, event.message)
            return []
        elif isinstance(event.message, PrefixBlocksChanged):  # nor does this let a prompt go anywhere
            self._placement.update_prefixes(event.peer, event.message)
            return []
        else:
            commands = self._on_message(event.peer, event.message, now)
        if len(self._registry.queue):
            commands += self._dispatch_prefills(now)
        self._admission.observe_queue(now)
        if is_report_due(self._last_attempt, self._reported_attempt):
            commands += self._report_status(now)
        if self._placement.num_pooled:
            commands += self._form_batches(now)
        return commands

    def _on_other(
        self, event: PeerConnected | PeerDisconnected | Ticked | LengthPredicted | DrainRequested, now: float
    ) -> list[Send]:
        match event:
            case LengthPredicted():
                tracked = self._registry.requests.get(event.request_id)
                if tracked is None:
                    return []
                return note_prediction(tracked, event.predicted_len)
            case PeerConnected(role, peer):
                if role is Role.GATEWAY:
                    self._gateways[peer] = ""
                elif role is Role.KV_POOL:
                    self._placement.prefixes.add_pool(peer)
                return []
            case PeerDisconnected(_, peer):
                return self._on_disconnected(peer)
            case DrainRequested():
                self._placement.set_draining(event.draining)
                requests = self._registry.requests.values()
                return self._registry.move(
                    [request for request in requests if self._placement.is_leaving(request, event.moved)]
                )
            case Ticked():
                return self._on_tick(now)

    def _on_message(self, peer: str, message: Message, now: float) -> list[Send]:
        match message:  # those of every request and iteration first
            case WorkerLoad():
                self._placement.update_load(peer, message)
            case SubmitRequest():
                return self._submit(peer, message, now)
            case PrefillCompleted():
                return self._prefill_completed(peer, message, now)
            case RequestPooled():
                return self._ownership.pooled(peer, message, now)
            case RequestFinished():
                return self._finished(message, now)
            case BatchReceived():
                return self._ownership.batch_received(peer, message, now)
            case BatchFormed():
                return self._ownership.batch_formed(message, now)
            case AbortRequest():
                return self._abort(message.request_id)
            case ResumeRequest():
                return self._resume(peer, message, now)
            case GatewayRegistered():
                self._gateways[peer] = message.node
                self._has_joined = True
            case WorkerRegistered() | PoolRegistered():
                self._has_joined = True
                return self._register(peer, message, now)
            case CopyKept():
                return self._ownership.copy_kept(peer, message)
            case CopyLost():
                return self._ownership.copy_lost(peer, message)
            case RequestPreempted():
                return self._preempted(peer, message, now)
            case RequestMoved():
                return self._ownership.moved(peer, message)
            case RequestStayed():
                return self._ownership.stayed(message)
            case AttemptFailed():
                return self._failed(peer, message)
            case BlocksFetched(source, num_blocks, duration_s):
                self._placement.links.observe(peer, source, num_blocks, duration_s)
            case IterationLogReport():
                self._counters.add_iterations(message, self._placement.workers.get(peer))
            case _:
                raise AssertionError(f"the router does not take {type(message).__name__}")
        return []

    def _register(self, peer: str, message: WorkerRegistered | PoolRegistered, now: float) -> list[Send]:
        self._last_attempt = max(self._last_attempt, message.latest_attempt)
        reason = self._placement.register(peer, message)
        if reason is not None:
            return [Send(peer, RegistrationRefused(reason))]
        worker = self._placement.workers.get(peer)
        if worker is None:
            return []
        workers = self._placement.workers.values()
        commands = announce_all(worker, workers) + announce_prefiller(worker, workers)
        if isinstance(message, WorkerRegistered):
            commands += self._adoption.worker_registered(worker, message.decoding, now)
        return commands

    def _submit(self, gateway: str, message: SubmitRequest, now: float) -> list[Send]:
        if (rejection := self._admission.rejection(message.request, now)) is not None:
            return [Send(gateway, rejection)]
        tracked = self._tracked(gateway, message.request, (), message.block_names)
        self._registry.accept(tracked)
        self._admission.accepted(tracked, now)
        return []

    def _tracked(
        self, gateway: str, request: Request, generated_token_ids: tuple[int, ...], block_names: bytes
    ) -> TrackedRequest:
        tracked = TrackedRequest(request, gateway, self._registry.lengths.predict(request), block_names=block_names)
        tracked.set_generated(generated_token_ids)
        return tracked

    def _resume(self, gateway: str, message: ResumeRequest, now: float) -> list[Send]:
        tracked = self._registry.requests.get(message.request.request_id)
        if tracked is None:  # accepted by a router before this one, or finished with tokens that never arrived
            if message.latest_attempt:  # what an earlier attempt left somewhere must be older than the next one
                self._last_attempt = max(self._last_attempt, beyond_unreported(message.latest_attempt))
            tracked = self._tracked(gateway, message.request, message.generated_token_ids, message.block_names)
            return self._adoption.resume(tracked, message.holder, now)
        # A request still being served needs nothing, unless tokens that it builds on were lost with a worker.
        num_more = len(message.generated_token_ids) - tracked.num_emitted
        if tracked.stage is Stage.QUEUED:
            is_well = message.request.request_id in self._registry.queue and num_more == 0
        else:
            is_well = num_more >= 0
        if tracked.gateway != gateway or is_well:
            return []
        tracked.block_names = message.block_names
        self._adoption.await_no_more(message.request.request_id)
        return self._registry.resume_from(tracked, message.generated_token_ids)

    def _abort(self, request_id: RequestId) -> list[Send]:
        tracked = self._registry.requests.get(request_id)
        return self._adoption.ended(request_id) if tracked is None else self._registry.abort(tracked)

    def _prefill_completed(self, peer: str, message: PrefillCompleted, now: float) -> list[Send]:
        worker = self._placement.workers.get(peer)
        if worker is None or not self._placement.complete_prefill(worker, message.request_id, message.attempt):
            return []
        tracked = self._registry.current(message.request_id, message.attempt)
        self._counters.count_prefill(tracked, worker, message.num_tokens, now)
        if tracked is None or tracked.stage is not Stage.PREFILLING or tracked.holder != peer:
            return []
        if worker.registered.can_decode:
            self._placement.set_decoding(tracked, worker)
            return []
        tracked.is_prefilled = True
        pool = self._placement.pool_of(peer)
        if pool is not None and pool.epoch == tracked.pool_epoch:
            return []
        # The pool was lost meanwhile, perhaps after it had taken the blocks and before its message arrived.
        return [Send(peer, AbortRequest(message.request_id, message.attempt)), *self._registry.interrupt([tracked])]

    def _finished(self, message: RequestFinished, now: float) -> list[Send]:
        tracked = self._registry.current(message.request_id, message.attempt)
        if tracked is None:
            return self._adoption.ended(message.request_id)
        self._counters.count_finished(tracked, message.num_generated, now)
        return self._registry.finish(tracked, message.num_generated)

    def _preempted(self, peer: str, message: RequestPreempted, now: float) -> list[Send]:
        tracked = self._registry.current(message.request_id, message.attempt)
        worker = self._placement.workers.get(peer)
        # It gives up a handoff whose receiver was lost; if another holder has the request by then, that one keeps it.
        if tracked is None or worker is None or tracked.holder != peer or message.attempt < tracked.attempt:
            return self._adoption.ended(message.request_id) if tracked is None else []
        self._counters.count_preemption(is_refused=message.handoff_refused)
        generated, is_refused = message.generated_token_ids, message.handoff_refused
        return self._registry.requeue(tracked, generated, now, is_refused=is_refused)

    def _failed(self, peer: str, message: AttemptFailed) -> list[Send]:
        tracked = self._registry.current(message.request_id, message.attempt)
        if tracked is None:
            return self._adoption.ended(message.request_id)
        self._placement.adapters.fail(peer, tracked.adapter)
        return self._registry.fail(tracked, message.kind, message.reason)

    def _on_disconnected(self, peer: str) -> list[Send]:
        self._gateways.pop(peer, None)
        orphans = [tracked for tracked in self._registry.requests.values() if tracked.gateway == peer]
        commands = [command for tracked in orphans for command in self._registry.abort(tracked)]
        self._placement.prefixes.remove_pool(peer)
        if peer not in self._placement:
            return commands
        lost = [tracked for tracked in self._registry.requests.values() if self._placement.depends_on(tracked, peer)]
        # A request on its way to a lost worker may still be at the giver, which only this tells to release it.
        commands += [send for tracked in lost if tracked.holder != peer for send in self._ownership.call_back(tracked)]
        commands += self._registry.interrupt(lost)
        worker = self._placement.workers.get(peer)
        self._placement.remove(peer)
        self._adoption.worker_lost(peer)
        if worker is None:
            return commands
        return commands + announce_prefiller(worker, self._placement.workers.values(), is_lost=True)

    @property
    def records(self) -> RouterRecords:
        return RouterRecords(self._registry, self._placement, self._gateways, self._admission.drain)

    def num_left(self, names: Iterable[str]) -> dict[str, int]:
        requests = self._registry.requests.values()
        left = {name: sum(self._placement.depends_on(request, name) for request in requests) for name in names}
        for name in left:
            worker = self._placement.workers.get(name)
            left[name] += worker is not None and worker.pending_batch is not None  # an answer that may hold some
            left[name] += self._adoption.num_at(name)
        return left

    @property
    def registrations(self) -> dict[str, int]:
        return {worker.name: worker.registration for worker in self._placement.workers.values()}

    def _dispatch_prefills(self, now: float) -> list[Send]:
        commands: list[Send] = []
        self._placement.note_late_prompts(now)
        while (chosen := self._prefill_choice.next(self._gateways, now)) is not None:
            tracked, worker, hit = chosen
            request_id = tracked.request.request_id
            tracked.move(Stage.PREFILLING, worker.name)
            tracked.is_prediction_late = False  # it comes with the prompt
            self._counters.count_dispatch(tracked, now)
            self._last_attempt = tracked.attempt = next_epoch(self._last_attempt, now)
            pool = self._placement.pool_of(worker.name)
            tracked.pool_epoch = pool.epoch if pool is not None else None
            if pool is not None and pool.num_pooled:
                self._bypass.observe_waiting(now - pool.oldest_s)
            far_pool = self._placement.prefixes.far_pool(tracked, worker)  # before it is counted as computed there
            self._placement.start_prefill(worker, request_id, dispatched(tracked, hit))
            commands.append(Send(worker.name, self._prefill_request(tracked, worker, far_pool, now)))
            if tracked.destination is not None:
                commands += need_prefiller(worker, self._placement.workers[tracked.destination])
        return commands

    def _prefill_request(
        self, tracked: TrackedRequest, worker: WorkerRecord, far_pool: WorkerName | None, now: float
    ) -> PrefillRequest:
        pool = self._placement.copy_of(tracked)
        near = self._placement.free_by_distance(worker)
        targets = (self._bypass.target(tracked.request, tracked.num_prefill_tokens, able) for able in near)
        decoder = next((target for target in targets if target is not None), None)
        self._placement.set_destination(tracked, decoder)
        return PrefillRequest(
            tracked.request,
            tracked.attempt,
            tracked.generated_token_ids,
            has_copy=pool is not None and pool == worker.registered.pool_name,
            bypass_to=WorkerName(tracked.destination) if tracked.destination is not None else None,
            predicted_output_len=expected_len(tracked),
            prefix_pool=far_pool,
            begun_s=tracked.begun_s(now),
        )

    def _form_batches(self, now: float) -> list[Send]:
        commands: list[Send] = []
        for pool, form in self._placement.batches_to_form(now, self._registry.queue.is_shared):
            commands += [*need_pool(pool, self._placement.workers[form.worker]), Send(pool, form)]
        return commands

    def _on_tick(self, now: float) -> list[Send]:
        self._placement.clear_refusals()  # a pool may have connected to a worker since
        self._num_ticks += 1
        self._admission.observe_chats(self._counters.num_prompt_tokens, now)
        moves = self._leans.moves(self._placement.workers.values(), self._registry.requests, now)
        commands = [send for pair in self._leans.wished for send in need_receiver(*pair)]
        commands += [send for move in moves for send in self._ownership.order_move(*move)] + self._adoption.tick(now)
        if self._num_ticks % _TICKS_PER_STATUS and not self._has_joined:
            return commands
        return commands + self._report_status(now)

    def _report_status(self, now: float) -> list[Send]:
        self._reported_attempt, self._has_joined = self._last_attempt, False
        requests, forecast = self._registry.requests.values(), QueueForecast(now, self._admission.real_time_wait_s())
        status = status_of(requests, self._placement, self._counters, self._last_attempt, forecast)
        return [Send(gateway, status) for gateway in self._gateways]


def make_logic(*, config: RouterConfig, batching: BatchingConfig) -> RouterLogic:
    """Build the logic; what is unset defaults to `aligned_slo`. Raises ConfigError naming the field."""
    placement = Placement(max_candidate_requests=config.max_candidate_requests, batching=batching)
    return RouterLogic(
        config=config,
        placement=placement,
        order=make_prefill_order(config.prefill_order or "least_slack"),
        bypass=_bypass(config, batching),
        leans=FarLeans(placement.links) if config.moves_between_nodes else Leans(),
    )


def _bypass(config: RouterConfig, batching: BatchingConfig) -> Bypass:
    if config.direct_handoff:
        return DirectHandoff()
    return UrgentBypass() if batching.pack_share is None else PackedBypass()
