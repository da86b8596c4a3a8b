"""What a decode worker decides, every iteration, by itself and without any remote call.

The life of a request on a decode worker:
1. BatchGranted: it is a candidate; its cache waits in the pool under a lease, and is prefetched into a prefill worker's
   memory unless it can run at once. An urgent one comes straight from a prefill worker. (candidates.py)
2. When its turn has come (batches.py) and its blocks and those of its next iterations fit, its cache is copied into
   blocks of ours beside the running iteration, verified, and it enters with the next one. What does not verify is a
   miss: RequestPreempted sends it back to be recomputed.
3. Every iteration gives it one token, which goes straight to its gateway.
4. It ends with its stop token or its limit: blocks freed, RequestFinished. Or the client leaves: AbortRequest.
5. When the next iteration would not fit, the longest request (while two batches mix, of the outgoing one) is evicted
   into a prefill worker's memory, from where it comes back. When its batch has gone, it returns to the pool.
   Where there is no room for it, it is preempted and recomputed later.
A colocated worker takes PrefillRequest as well: its prompt is computed in chunks beside the decodes, in one budget.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.progress import finish_reason
from alignedserve.core.request import FinishReason, SampledToken
from alignedserve.messages.events import CommonEvent, PeerLinked, PeerLost, Received, Send, SendTo, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    IterationCompleted,
    Load,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    RunIteration,
    UnmapArena,
    group_by_gateway,
)
from alignedserve.messages.links import (
    NO_BATCH,
    AbortRequest,
    ArenaOffered,
    AttemptFailed,
    BatchGranted,
    BatchReceived,
    BlocksPrefetched,
    BlocksWritten,
    CancelReservation,
    FailureKind,
    LedgerReport,
    PrefillCompleted,
    PrefillRequest,
    PromptScored,
    RequestFinished,
    RequestPreempted,
    RequestReturned,
    ReserveBlocks,
    TokenDelta,
    WorkerLoad,
    WorkerRegistered,
)
from alignedserve.messages.wire import Message
from decode_worker.batches import BatchOrder, SwitchLimits, WaitingBatch
from decode_worker.candidates import Candidates
from decode_worker.eviction import EvictionCommand, Evictions
from decode_worker.ledger import Ledger
from decode_worker.load import LoadCounter
from decode_worker.running import RunningBatch
from decode_worker.state import CachePlace, Candidate, Loading, RunningRequest

DecodeEvent = CommonEvent | IterationCompleted | BlocksLoaded | BlocksOffloaded
WorkCommand = RunIteration | LoadBlocks | OffloadBlocks | MapArena | UnmapArena
DecodeCommand = Send | SendTo | WorkCommand


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What bounds the running batch."""

    max_running: int
    max_tokens: int  # per iteration; decodes always go in, prompts share what they leave
    switch: SwitchLimits = field(default_factory=SwitchLimits)


class DecodeLogic:
    """Candidates, the running batch, and the one iteration that is in flight at a time."""

    def __init__(self, *, registered: WorkerRegistered, limits: DecodeLimits, eos_token_ids: frozenset[int]) -> None:
        self._registered = registered
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._batch = RunningBatch(
            num_blocks=registered.num_blocks, block_size=registered.block_size, max_running=limits.max_running
        )
        self._candidates = Candidates(registered.pool_name)
        self._order = BatchOrder(limits.switch)
        self._evictions = Evictions(self._batch, self._candidates, self._order)
        self._is_iterating = False
        self._router: str | None = None
        self._load = LoadCounter(self._batch, self._candidates, self._order, self._evictions)
        self._moved_at: tuple[int, int, int] | None = None  # versions at which candidates were last looked through
        self._num_iterations = 0
        self._num_verified = 0
        self._reported: WorkerLoad | None = None
        self.ledger = Ledger()

    def on_event(self, event: DecodeEvent, now: float) -> list[DecodeCommand]:
        """Same state, event and now always give the same commands. Touches nothing outside self."""
        commands = self._handle(event, now)
        # The next iteration first: it computes while the messages about the last one are sent.
        started = self._start_iteration(now)
        moved = self._move_candidates(now)
        # Who entered without a copy need not wait for another event.
        started += self._start_iteration(now)
        return [*started, *commands, *moved, *self._report()]

    def _handle(self, event: DecodeEvent, now: float) -> list[DecodeCommand]:
        match event:
            case IterationCompleted():
                self.ledger.iteration_completed(now, event)
                return self._iteration_completed(event)
            case BlocksLoaded():
                return self._loaded(event)
            case BlocksOffloaded():
                return self._told(self._evictions.evicted(event))
            case Received(peer, message):
                return self._on_message(peer, message, now)
            case PeerLinked(role, peer):
                return self._on_linked(role, peer)
            case PeerLost(role, peer):
                return self._on_lost(role, peer)
            case Ticked():
                return self._report_totals(now)

    # --- peers and messages

    def _on_linked(self, role: Role, peer: str) -> list[DecodeCommand]:
        if role is not Role.ROUTER:
            return []
        self._router = peer
        self._reported = None
        # A router that comes (back) knows nothing of what we hold: its gateways resume those requests through it.
        dropped: list[DecodeCommand] = [*self._candidates.clear()]
        for running in list(self._batch):
            dropped += self._abort(running.request.request_id)
        for candidate in (*self._batch.loading_candidates(), *self._evictions.candidates()):
            candidate.is_aborted = True
        return [Send(peer, self._registered), *dropped]

    def _on_lost(self, role: Role, peer: str) -> list[DecodeCommand]:
        if peer == self._registered.pool_name:
            lost = self._candidates.pool_lost()
            return [UnmapArena(peer), *(command for candidate in lost for command in self._missed(candidate))]
        if role is not Role.PREFILL_WORKER:
            return []
        lost = self._candidates.prefill_worker_lost(peer)
        return [UnmapArena(peer), *(command for candidate in lost for command in self._preempted(candidate))]

    def _on_message(self, peer: str, message: Message, now: float) -> list[DecodeCommand]:
        match message:
            case BatchGranted():
                return self._granted(message, now)
            case PrefillRequest():
                return self._take(Candidate.of_prefill(message, now))
            case AbortRequest():
                return self._abort(message.request_id, message.attempt)
            case ArenaOffered():
                if peer != self._registered.pool_name:
                    self._candidates.space.opened(peer, message.num_blocks)
                return [MapArena(peer, message)]
            case BlocksPrefetched():
                missed = self._candidates.prefetched(message)
                return self._missed(missed, self._candidates.abort(message.request_id)) if missed is not None else []
            case RequestReturned():
                candidate = self._candidates.returned(message)
                return self._preempted(candidate) if candidate is not None else []
            case ReserveBlocks():
                return [*self._candidates.reserve(peer, message)]
            case CancelReservation():
                self._candidates.cancel_reservation(message.request_id, message.attempt)
                return []
            case BlocksWritten():
                return self._written(peer, message, now)
        raise AssertionError(f"a decode worker does not take {type(message).__name__}")

    def _granted(self, message: BatchGranted, now: float) -> list[DecodeCommand]:
        self._reported = None  # the router waits for the load after a grant, even if it is as before
        members = tuple((handoff.request.request_id, handoff.attempt) for handoff in message.handoffs)
        commands = self._to_router(BatchReceived(message.batch_id, members))
        batch_id = message.batch_id if message.joins is None else message.joins
        if message.joins is None:
            self._order.granted(WaitingBatch(batch_id, message.is_aligned, len(members), now))
        for handoff in message.handoffs:
            commands += self._take(Candidate.of_handoff(handoff, batch_id, now))
        return commands

    def _written(self, peer: str, message: BlocksWritten, now: float) -> list[DecodeCommand]:
        candidate, answer = self._candidates.written(peer, message, now)
        if candidate is None:
            return [*answer]
        received = BatchReceived(NO_BATCH, ((candidate.request.request_id, candidate.attempt),))
        return [*answer, *self._to_router(received), *self._take(candidate)]

    def _take(self, candidate: Candidate) -> list[DecodeCommand]:
        # What an earlier attempt left here is stale: its abort is on the way, over another link.
        commands = self._abort(candidate.request.request_id, candidate.attempt - 1)
        self._candidates.add(candidate)
        return commands

    def _abort(self, request_id: RequestId, attempt: int | None = None) -> list[DecodeCommand]:
        """End what is here of a request; with an attempt, only of that one and earlier ones."""
        commands: list[DecodeCommand] = []
        self._candidates.forget_given_back(request_id, attempt)
        waiting = self._candidates.get(request_id)
        if waiting is not None and _is_up_to(waiting, attempt):
            commands += self._candidates.abort(request_id)
        for candidate in (self._batch.loading_candidate(request_id), self._evictions.get(request_id)):
            if candidate is not None and _is_up_to(candidate, attempt):
                candidate.is_aborted = True
        running = self._batch.get(request_id)
        if running is not None and _is_up_to(running, attempt):
            running.is_aborted = True
            if not self._is_iterating:
                self._batch.drop(running)
        return commands

    # --- candidates: in, and back

    def _move_candidates(self, now: float) -> list[DecodeCommand]:
        """Admit who may enter, prefetch the others, give back who has missed its batch."""
        if not self._candidates:
            return []
        commands: list[DecodeCommand] = []
        if self._batch.num_holding < self._limits.max_running or self._order.is_overdue(now):
            commands += self._admit(self._order.choose(self._candidates, self._batch.num_holding, now))
        versions = (self._candidates.version, self._order.version, self._candidates.space.version)
        if versions == self._moved_at:
            return commands  # what could be done for the others has been done
        self._moved_at = versions
        for candidate in list(self._candidates):
            if self._order.is_stray(candidate):
                commands += self._candidates.give_back(candidate)
            else:
                commands += self._candidates.prefetch(candidate)
        return [*commands, *self._candidates.relieve_buffers()]

    def _admit(self, may_enter: Iterable[Candidate]) -> list[DecodeCommand]:
        """Candidates that fit, in order; nobody overtakes one that does not, but one that is still on its way waits."""
        loads: dict[str, list[Load]] = {}
        for candidate in may_enter:
            if candidate.place in (CachePlace.COMING, CachePlace.RETURNING):
                continue
            if self._evictions.get(candidate.request.request_id) is not None:
                continue  # an earlier life of it is still on its way out
            block_ids = self._batch.blocks_if_fits(candidate)
            if block_ids is None:
                break
            self._candidates.take(candidate)
            if candidate.place is CachePlace.NOWHERE:
                self._enter(candidate, block_ids, 0)
                continue
            source, copy = self._candidates.copy_of(candidate)
            self._batch.load(Loading(candidate, block_ids))
            loads.setdefault(source, []).append(Load(candidate.request.request_id, copy, block_ids))
        return [LoadBlocks(source, tuple(parts)) for source, parts in loads.items()]

    def _enter(self, candidate: Candidate, block_ids: tuple[BlockId, ...], num_cached: int) -> None:
        self._batch.enter(RunningRequest.of_candidate(candidate, block_ids, num_cached))

    def _loaded(self, event: BlocksLoaded) -> list[DecodeCommand]:
        commands: list[DecodeCommand] = []
        for load in event.loads:
            entry = self._batch.loaded(load.request_id)
            candidate = entry.candidate
            is_refused = load.request_id in event.refused
            self._num_verified += not is_refused
            if is_refused and not candidate.is_aborted:
                commands += self._missed(candidate)
            commands += self._candidates.let_go(candidate)
            if is_refused or candidate.is_aborted:
                self._batch.free(entry.block_ids)
            else:
                self._enter(candidate, entry.block_ids, load.copy.context_len)
        return commands

    # --- starting an iteration

    def _start_iteration(self, now: float) -> list[DecodeCommand]:
        if self._is_iterating:
            return []
        commands: list[DecodeCommand] = [*self._evictions.evict_outgoing()]
        growth = self._batch.grow()
        extensions = growth.extensions
        if growth.num_missing > 0:
            commands += self._told(self._evictions.make_way(growth.num_missing, num_stalled=growth.num_stalled))
            if growth.num_stalled:
                extensions += self._batch.grow().extensions
        slices = self._batch.slices(self._limits.max_tokens)
        if not slices:
            return commands + self._give_up_stuck()
        removals, additions = self._batch.entering()
        extensions = tuple(entry for entry in extensions if self._batch.get(entry[0]) is not None)
        self._is_iterating = True
        self._num_iterations += 1
        iteration = RunIteration(removals, additions, extensions, slices)
        self.ledger.iteration_started(now, iteration, self._batch.all(), is_switching=self._order.is_switching)
        return [iteration, *commands]

    def _give_up_stuck(self) -> list[DecodeCommand]:
        """One request alone that does not fit this worker: no block will ever come free for it."""
        stuck = self._batch.stuck()
        if stuck is None or self._evictions.candidates():
            return []
        self._batch.drop(stuck)
        reason = "its context needs more cache blocks than a decode worker has"
        return self._to_router(AttemptFailed(stuck.request.request_id, stuck.attempt, FailureKind.UNSERVABLE, reason))

    # --- ending an iteration

    def _iteration_completed(self, event: IterationCompleted) -> list[DecodeCommand]:
        self._is_iterating = False
        commands: list[DecodeCommand] = []
        for running in self._batch:
            running.num_computed += running.num_in_flight
            running.num_in_flight = 0
        scored: list[DecodeCommand] = []
        for scores in event.prompt_scores:
            reply_to = self._batch[scores.request_id].request.reply_to
            scored.append(SendTo(reply_to, PromptScored(scores.request_id, scores.first_position, scores.entries)))
        deltas: list[tuple[str, TokenDelta]] = []
        for token in event.sampled:
            commands += self._sampled(token, deltas)
        for request_id in event.failed:
            running = self._batch[request_id]
            self._batch.drop(running)
            reason = "the model gave no usable logits"
            commands += self._to_router(AttemptFailed(request_id, running.attempt, FailureKind.INTERNAL, reason))
        for running in [running for running in self._batch if running.is_aborted]:
            self._batch.drop(running)
        # Scores of a prompt go before its token; reports to router and pool last, nobody waits for them.
        return [*scored, *group_by_gateway(deltas), *commands]

    def _sampled(self, token: SampledToken, deltas: list[tuple[str, TokenDelta]]) -> list[DecodeCommand]:
        running = self._batch[token.request_id]
        request = running.request
        if running.is_aborted:
            return []
        index = len(running.generated_token_ids)
        commands: list[DecodeCommand] = []
        if running.is_prefilling:
            running.is_prefilling = False
            commands += self._to_router(PrefillCompleted(request.request_id, running.attempt, running.context_len))
        if request.sampling.max_tokens == 0:  # only the prompt was to be scored
            deltas.append((request.reply_to, TokenDelta(request.request_id, 0, (), (), FinishReason.LENGTH)))
            return commands + self._finish(running)
        running.note_token(token.token_id)
        finished = finish_reason(request, token.token_id, index + 1, self._eos_token_ids)
        logprobs = (token.logprob,) if token.logprob is not None else ()
        deltas.append((request.reply_to, TokenDelta(request.request_id, index, (token.token_id,), logprobs, finished)))
        return commands + self._finish(running) if finished is not None else commands

    def _finish(self, running: RunningRequest) -> list[DecodeCommand]:
        self._batch.drop(running)
        num_generated = len(running.generated_token_ids)
        return self._to_router(RequestFinished(running.request.request_id, running.attempt, num_generated))

    # --- misses

    def _missed(self, candidate: Candidate, let_go: Iterable[Send] = ()) -> list[DecodeCommand]:
        """What was granted did not verify, or is gone with the pool: it is computed again."""
        return [*let_go, *self._preempted(candidate, is_refused=True)]

    def _preempted(self, candidate: Candidate, *, is_refused: bool = False) -> list[DecodeCommand]:
        """Its only cache was in memory that is gone, or that there was no room beyond."""
        request_id, generated = candidate.request.request_id, candidate.generated_token_ids
        return self._to_router(RequestPreempted(request_id, candidate.attempt, generated, handoff_refused=is_refused))

    # --- reports

    def _to_router(self, message: Message) -> list[DecodeCommand]:
        return [Send(self._router, message)] if self._router is not None else []

    def _told(self, outcomes: list[EvictionCommand]) -> list[DecodeCommand]:
        """Copies as they are; who was preempted goes to the router."""
        parts = [[one] if isinstance(one, OffloadBlocks) else self._to_router(one) for one in outcomes]
        return [command for part in parts for command in part]

    def _report_totals(self, now: float) -> list[DecodeCommand]:
        """What the ledger gained, about once a second; kept until there is a router."""
        totals = self.ledger.take_totals(now) if self._router is not None else None
        return self._to_router(LedgerReport(totals)) if totals is not None else []

    def _report(self) -> list[DecodeCommand]:
        load = self._load.load(num_verified=self._num_verified, num_iterations=self._num_iterations)
        if load == self._reported or self._router is None:
            return []
        self._reported = load
        return self._to_router(load)


def _is_up_to(one: Candidate | RunningRequest, attempt: int | None) -> bool:
    return attempt is None or one.attempt <= attempt
