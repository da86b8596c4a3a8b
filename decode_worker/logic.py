"""Decisions of a decode worker, in every iteration and without any remote call.

The life of a request on a decode worker:
1. BatchGranted: it is a candidate; its cache waits in the pool under a lease, and is prefetched into a prefill worker's
   memory unless it can run at once. An urgent one comes straight from a prefill worker. (batching/candidates.py)
2. When its batch is due (batching/batch_order.py) and its blocks and those of its next iterations fit, its cache is
   copied into this worker's blocks beside the running iteration, verified, and it enters with the next one. A copy that
   does not verify is a miss: RequestPreempted sends the request back to be recomputed. (batching/eviction.py)
3. Every iteration adds a token, or more where the grammar forces them, and sends them to its gateway. Where a
   policy decides, it may pause, leave for the host, or lose its cache, to be computed again by a prefill worker
   (batching/scheduled_batch.py); 5 is then for switches.
4. Its stop token or limit ends it: blocks freed, RequestFinished. Or the client leaves: AbortRequest.
5. When the next iteration would not fit, the longest request (while two batches mix, of the outgoing one) is evicted
   into a prefill worker's memory, from where it is loaded again. When its batch has ended, it returns to the pool.
   If no buffer has space for it, it is preempted and recomputed later. (batching/eviction.py)
"""

from collections.abc import Iterable

from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.messages.caches import (
    ArenaOffered,
    BatchGranted,
    BlocksPrefetched,
    BlocksWritten,
    CancelReservation,
    RequestReturned,
    ReservationRefused,
    ReserveBlocks,
)
from alignedserve.messages.events import PeerConnected, PeerDisconnected, Received, Send
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    IterationCompleted,
    MapArena,
    OffloadBlocks,
    UnmapArena,
)
from alignedserve.messages.pools import BatchReceived
from alignedserve.messages.workers import SetPredictedLength, WorkerLoad, WorkerRegistered
from alignedserve.worker_core.block_peers import BlockPeers
from alignedserve.worker_core.candidate import Candidate
from alignedserve.worker_core.part import Commands, WorkerCommand, WorkerEvent
from alignedserve.worker_core.request import WorkerRequest
from alignedserve.worker_core.request_notes import Phases, WaitingRequest
from alignedserve.worker_core.worker_logic import WorkerLogic
from decode_worker.batching.batch_order import BatchOrder, DecodeLimits, waiting_batch
from decode_worker.batching.candidates import Candidates
from decode_worker.batching.eviction import EvictionCommand, Evictions
from decode_worker.batching.running_batch import BatchMember, RunningBatch
from decode_worker.batching.scheduled_batch import DecodeBatch
from decode_worker.load import LoadCounter, Pace
from decode_worker.state import set_predicted_length


class DecodeLogic(WorkerLogic[BatchMember]):
    """Candidates, the running batch, and the one iteration that is in flight at a time."""

    phases = Phases.DECODE
    kind = "decode worker"

    def __init__(
        self,
        *,
        registered: WorkerRegistered,
        limits: DecodeLimits,
        eos_token_ids: frozenset[int],
        batch: DecodeBatch | None = None,
        state_blocks: int = 0,
    ) -> None:
        """`batch`: empty; None: all requests are in every iteration, and no objective bounds it. `state_blocks`: of
        every request, before those of its tokens."""
        super().__init__(registered, eos_token_ids)
        most = limits.max_running_requests
        running_batch = RunningBatch.of_worker(registered, most, state_blocks=state_blocks) if batch is None else batch
        self._batch: DecodeBatch = running_batch
        self._by_id = self._batch.by_id
        knows_classes = limits.switch.best_effort_floor is not None
        self._candidates = Candidates(
            registered.pool_name, registered.block_size, knows_classes=knows_classes, state_blocks=state_blocks
        )
        self._peers = BlockPeers(registered.pool_name)
        self._parts = (self._peers,)
        packs = self._batch.packing is not None
        self._order = BatchOrder(limits.switch, self._batch.is_mixing_cheaper, packs=packs)
        self._evictions = Evictions(self._batch, self._candidates, self._order)
        self._aborted: list[BatchMember] = []  # dropped at the end of the iteration
        self._unreached: list[Candidate] = []  # given back with the next tick: at once, they would come back at once
        self._counter = LoadCounter(self._batch, self._candidates, self._order, self._evictions)
        self._moved_at: tuple[int, int, int] | None = None  # versions at which candidates were last examined
        self._num_iterations = 0
        self._num_verified = 0
        self._pace = Pace(registered.pool_name, self._batch.decode_s)

    @override
    def _on_other(self, event: WorkerEvent, now: float) -> Commands:
        match event:
            case BlocksLoaded():
                return self._loaded(event, now)
            case BlocksOffloaded():
                return self._send_evictions(self._evictions.evicted(event))
            case PeerConnected(role, peer):
                if self._peers.connected(role, peer):
                    self._router.await_load()  # a pool that gave nothing to a worker without a link may be asked again
                self._pace.connected(role, peer)
                return ()
            case PeerDisconnected(Role.KV_POOL, peer):
                self._pace.disconnected(peer)
                lost = self._candidates.pool_disconnected(peer)
                return [UnmapArena(peer), *self._preempted(*lost, is_refused=True)]
            case PeerDisconnected(Role.PREFILL_WORKER, peer):
                return [UnmapArena(peer), *self._preempted(*self._candidates.prefill_worker_disconnected(peer))]
            case Received(peer, BatchGranted() as granted):
                return self._granted(peer, granted, now)
            case Received(peer, ArenaOffered() as offered):
                is_buffer = not self._peers.is_pool(peer)
                if is_buffer:
                    self._candidates.buffer_offered(peer, offered)
                return [MapArena(peer, offered, stamps=is_buffer)]
            case Received(_, BlocksPrefetched() as prefetched):
                missed = self._candidates.prefetched(prefetched)
                if missed is None:
                    return ()
                return [*self._candidates.abort(prefetched.request_id), *self._preempted(missed, is_refused=True)]
            case Received(_, RequestReturned() as returned):
                candidate = self._candidates.returned(returned, now)
                return self._preempted(candidate) if candidate is not None else ()
            case Received(peer, ReserveBlocks() as reserve):
                return self._reserve(peer, reserve)
            case Received(_, CancelReservation(request_id, attempt)):
                self._candidates.receiver.cancel(request_id, attempt)
                return ()
            case Received(peer, BlocksWritten() as written):
                return self._written(peer, written, now)
        return super()._on_other(event, now)

    @override
    def _router_connected(self, peer: str, now: float) -> Commands:
        # A new router knows no request here: its gateways resume them.
        dropped: list[WorkerCommand] = [*self._candidates.clear()]
        for running in list(self._batch):
            dropped += self._abort(running.request.request_id)
        for candidate in self._moving():
            candidate.is_aborted = True
        return [*self._router.connected(peer), *dropped]

    @override
    def _tick(self, now: float) -> Commands:
        unused = self._peers.hang_up_unused(now, lambda: self._candidates.peers_in_use(self._moving()))
        gone = self._preempted(*self._candidates.unheeded(now))
        gone += self._preempted(*self._unreached, is_refused=True)
        self._unreached = []
        return [*self._router.totals(self.iteration_log, now), *self._pace.report(), *unused, *gone]

    def _moving(self) -> list[Candidate]:
        return [*self._batch.loading.candidates(), *self._evictions.candidates()]

    @override
    def _set_predicted_length(self, message: SetPredictedLength) -> None:
        if set_predicted_length(self._records_of(message.request_id), message):
            self._batch.set_predicted_length(message.request_id, message.predicted_output_len)

    def _granted(self, pool: str, message: BatchGranted, now: float) -> Commands:
        self._router.await_load()
        far_pool = pool if pool != self._registered.pool_name else None
        members = tuple((handoff.request.request_id, handoff.attempt) for handoff in message.handoffs)
        received = BatchReceived(message.batch_id, members, far_pool or "")
        commands: list[WorkerCommand] = [*self._router.send(received)]
        batch_id = message.batch_id if message.joins is None else message.joins
        if message.joins is None:
            self._order.granted(waiting_batch(batch_id, message, now))
        for handoff in message.handoffs:
            self._router.observe(handoff.attempt)
            commands += self._add_candidate(Candidate.of_handoff(handoff, batch_id, now, far_pool=far_pool))
        return commands

    def _latest_attempt(self, request_id: RequestId) -> int:
        return max((record.attempt for record in self._records_of(request_id)), default=0)

    def _records_of(self, request_id: RequestId) -> list[WorkerRequest]:
        waiting, running = self._candidates.get(request_id), self._batch.get(request_id)
        moving = self._batch.loading.candidate(request_id), self._evictions.get(request_id)
        return [record for record in (waiting, running, *moving) if record is not None]

    def _reserve(self, peer: str, message: ReserveBlocks) -> Commands:
        request_id = message.request_id
        self._router.observe(message.attempt)
        if self._latest_attempt(request_id) > message.attempt:
            return [Send(peer, ReservationRefused(request_id, message.attempt))]
        return [*self._candidates.reserve(peer, message)]

    def _written(self, peer: str, message: BlocksWritten, now: float) -> Commands:
        candidate, answer = self._candidates.written(peer, message, now)
        if candidate is None:
            return [*answer]
        received = BatchReceived(NO_BATCH, ((candidate.request.request_id, candidate.attempt),))
        return [*answer, *self._router.send(received), *self._add_candidate(candidate)]

    def _add_candidate(self, candidate: Candidate) -> Commands:
        # What an earlier attempt left here is stale: its abort is on the way, over another link. So is what is still to
        # come of one, straight from a prefill worker, and the candidate itself if it came late.
        request_id, earlier = candidate.request.request_id, candidate.attempt - 1
        if self._latest_attempt(request_id) > candidate.attempt:
            return [*self._candidates.release(candidate)]
        commands = self._abort(request_id, earlier)
        self._candidates.receiver.cancel(request_id, earlier)
        if self._batch.never_fits(candidate):
            return [
                *commands,
                *self._candidates.release(candidate),
                *self._router.too_large(candidate, self.kind),
            ]
        self._candidates.add(candidate)
        return commands

    @override
    def _abort(self, request_id: RequestId, attempt: int | None = None) -> Commands:
        commands: list[WorkerCommand] = []
        self._candidates.forget_returned(request_id, attempt)
        waiting = self._candidates.get(request_id)
        if waiting is not None and waiting.is_up_to(attempt):
            commands += self._candidates.abort(request_id)
        for candidate in (self._batch.loading.candidate(request_id), self._evictions.get(request_id)):
            if candidate is not None:
                candidate.abort(attempt)
        running = self._batch.get(request_id)
        if running is not None and running.is_up_to(attempt):
            if not self._is_computing:
                self._batch.drop(running)
            elif not running.is_aborted:
                running.is_aborted = True
                self._aborted.append(running)
        return commands

    # --- candidates: admitted, prefetched, returned

    @override
    def _move(self, now: float) -> Commands:
        if not self._candidates:
            return []
        commands: list[WorkerCommand] = [*self._evictions.load(self._evictions.admitted(now))]
        versions = (self._candidates.version, self._order.version, self._candidates.space.version)
        if versions == self._moved_at:
            return commands  # what could be done for the others has been done
        self._moved_at = versions
        for candidate in self._candidates.to_move():
            if self._order.is_stray(candidate):
                commands += self._candidates.return_to_pool(candidate, now)
            else:
                commands += self._candidates.prefetch(candidate)
        return [*commands, *self._candidates.drain_buffers(now)]

    def _loaded(self, event: BlocksLoaded, now: float) -> Commands:
        fetched = self._peers.fetched(event)
        commands: list[WorkerCommand] = [*self._router.send(fetched)] if fetched is not None else []
        for load in event.loads:
            entry = self._batch.loaded(load.request_id)
            candidate = entry.candidate
            is_refused = load.request_id in event.refused
            self._num_verified += not is_refused
            if is_refused and not candidate.is_aborted:
                if event.is_reached:
                    commands += self._preempted(candidate, is_refused=True)
                else:
                    self._unreached.append(candidate)
            commands += self._candidates.release(candidate)
            if is_refused or candidate.is_aborted:
                self._batch.free(entry.block_ids)
            else:
                self._batch.enter(candidate, entry.block_ids, load.copy.context_len, now)
        return commands

    # --- iterations

    @override
    def _start_iteration(self, now: float) -> Commands:
        if self._is_computing:
            return []
        commands: list[WorkerCommand] = [*self._evictions.evict_outgoing(now, self._pace.iteration_s())]
        if isinstance(self._batch, RunningBatch):
            commands += self._make_room(self._batch)
        else:
            for dropped in self._batch.take_dropped():
                commands += self._router.send(dropped.preempted())
            commands += self._evictions.load(self._evictions.admitted(now))
            self._batch.view(self._evictions.may_enter(now), now)
        begun = self._batch.begin(now)
        if begun is None:
            return [*commands, *self._fail_stuck()]
        commands += self._evictions.load(begun.loads)
        if begun.command is None:
            return commands
        self._num_iterations += 1
        has_changed, is_switching, alone_s = begun.has_changed, self._order.is_switching, begun.alone_s
        self._begin_iteration(now, begun.members, has_changed=has_changed, is_switching=is_switching, alone_s=alone_s)
        return [begun.command, *commands]

    def _make_room(self, batch: RunningBatch) -> Commands:
        growth = batch.grow()
        if growth.num_missing <= 0:
            return []
        commands = self._send_evictions(self._evictions.free_blocks(growth.num_missing, num_stalled=growth.num_stalled))
        if growth.num_stalled:
            batch.grow()
        return commands

    def _fail_stuck(self) -> Commands:
        stuck = self._batch.stuck() if isinstance(self._batch, RunningBatch) else None
        if stuck is None or self._evictions.candidates():
            return []
        self._batch.drop(stuck)
        return [*self._router.too_large(stuck, self.kind)]

    @override
    def _completed(self, event: IterationCompleted, now: float) -> Commands:
        duration_s = self._end_iteration(event, now)
        self._pace.note(duration_s)
        self._batch.completed(event, now, duration_s)
        return self._outcome(event)

    @override
    def _pass_ended(self, event: IterationCompleted, now: float) -> Commands:
        aborted, self._aborted = self._aborted, []
        for running in aborted:
            if running.request.request_id not in event.failed:
                self._batch.drop(running)
        return ()

    @override
    def _end(self, request: BatchMember) -> Commands:
        self._batch.drop(request)
        return ()

    def _preempted(self, *candidates: Candidate, is_refused: bool = False) -> list[Send]:
        return [
            send for candidate in candidates for send in self._router.send(candidate.preempted(is_refused=is_refused))
        ]

    def _send_evictions(self, outcomes: list[EvictionCommand]) -> Commands:
        commands: list[WorkerCommand] = []
        for outcome in outcomes:
            commands += [outcome] if isinstance(outcome, OffloadBlocks) else self._router.send(outcome)
        return commands

    # --- beside them

    @override
    def waiting(self) -> Iterable[WaitingRequest]:
        return self._counter.waiting()

    @override
    def _load(self, *, is_due: bool) -> WorkerLoad | None:
        return self._counter.report(self._num_verified, self._num_iterations, is_due=is_due)
