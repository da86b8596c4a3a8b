"""What a decode worker decides, every iteration, by itself and without any remote call.

The life of a request on a decode worker:
1. BatchGranted: it is a candidate; its cache waits in the arena under a lease. The router hears of it.
2. When its blocks fit, it is admitted between two iterations: fetched, verified, and part of the running batch.
   A handoff that does not verify is a miss: RequestPreempted sends it back to be recomputed.
3. Every iteration gives it one token, which goes straight to its gateway.
4. It ends with its stop token or its limit: blocks freed, RequestFinished. Or the client leaves: AbortRequest.
5. When the next iteration would not fit, the longest request is preempted and recomputed later.
A colocated worker takes PrefillRequest as well: such a candidate is admitted without a handoff, and its prompt is
computed in chunks beside the decodes, under the same token budget. Nothing else is different.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.core.blocks import BlockAllocator, blocks_for
from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.core.progress import finish_reason, plan_chunks
from alignedserve.core.request import FinishReason, SampledToken
from alignedserve.messages.events import CommonEvent, PeerLinked, PeerLost, Received, Send, SendTo, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import Addition, IterationCompleted, MapArena, RunIteration, group_by_gateway
from alignedserve.messages.links import (
    AbortRequest,
    ArenaOffered,
    AttemptFailed,
    BatchGranted,
    BatchReceived,
    FailureKind,
    LeasesReleased,
    PrefillCompleted,
    PrefillRequest,
    PromptScored,
    RequestFinished,
    RequestPreempted,
    TokenDelta,
    WorkerLoad,
    WorkerRegistered,
)
from alignedserve.messages.wire import Message
from decode_worker.state import Candidate, RunningRequest

DecodeEvent = CommonEvent | IterationCompleted
DecodeCommand = Send | SendTo | RunIteration | MapArena


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What bounds the running batch."""

    max_running: int
    max_tokens: int  # per iteration; decodes always go in, prompts share what they leave


class DecodeLogic:
    """Candidates, the running batch, this worker's blocks, and the one iteration that is in flight at a time."""

    def __init__(self, *, registered: WorkerRegistered, limits: DecodeLimits, eos_token_ids: frozenset[int]) -> None:
        self._registered = registered
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._block_size = registered.block_size
        self._allocator = BlockAllocator(registered.num_blocks)
        self._candidates: dict[RequestId, Candidate] = {}
        self._running: dict[RequestId, RunningRequest] = {}
        self._removals: list[RequestId] = []
        self._fetching: list[tuple[RequestId, LeaseId]] = []  # leases that the current iteration reads
        self._is_iterating = False
        self._router: str | None = None
        self._num_verified = 0
        self._reported: WorkerLoad | None = None

    def on_event(self, event: DecodeEvent, now: float) -> list[DecodeCommand]:
        """Same state, event and now always give the same commands. Touches nothing outside self."""
        commands = self._handle(event)
        # The next iteration first: it computes while the messages about the last one are sent.
        started = [] if self._is_iterating else self._start_iteration()
        return [*started, *commands, *self._report()]

    def _handle(self, event: DecodeEvent) -> list[DecodeCommand]:
        match event:
            case IterationCompleted():
                return self._iteration_completed(event)
            case Received(_, message):
                return self._on_message(message)
            case PeerLinked(role, peer):
                return self._on_linked(role, peer)
            case PeerLost(_, peer):
                return self._on_lost(peer)
            case Ticked():
                return []

    # --- peers and messages

    def _on_linked(self, role: Role, peer: str) -> list[DecodeCommand]:
        if role is not Role.ROUTER:
            return []
        self._router = peer
        self._reported = None
        # A router that comes (back) knows nothing of what we hold: its gateways resume those requests through it.
        dropped = [self._abort(request_id) for request_id in (*self._candidates, *self._running)]
        return [Send(peer, self._registered), *(command for commands in dropped for command in commands)]

    def _on_lost(self, peer: str) -> list[DecodeCommand]:
        if peer != self._registered.pool_name:
            return []
        # The leases of our candidates went with the pool: misses, to be recomputed.
        lost = [candidate for candidate in self._candidates.values() if candidate.handoff is not None]
        for candidate in lost:
            del self._candidates[candidate.request.request_id]
        return [command for candidate in lost for command in self._missed(candidate)]

    def _on_message(self, message: Message) -> list[DecodeCommand]:
        match message:
            case BatchGranted():
                return self._granted(message)
            case PrefillRequest():
                return self._take([Candidate.of_prefill(message)])
            case AbortRequest():
                return self._abort(message.request_id, message.attempt)
            case ArenaOffered():
                return [MapArena(message)]
            case _:
                raise AssertionError(f"a decode worker does not take {type(message).__name__}")

    def _granted(self, message: BatchGranted) -> list[DecodeCommand]:
        members = tuple((handoff.request.request_id, handoff.attempt) for handoff in message.handoffs)
        commands = self._to_router(BatchReceived(message.batch_id, members))
        return commands + self._take(Candidate.of_handoff(handoff) for handoff in message.handoffs)

    def _take(self, candidates: Iterable[Candidate]) -> list[DecodeCommand]:
        commands: list[DecodeCommand] = []
        for candidate in candidates:
            request_id = candidate.request.request_id
            # What an earlier attempt left here is stale: its abort is on the way, over another link.
            commands += self._abort(request_id, candidate.attempt - 1)
            self._candidates[request_id] = candidate
        return commands

    def _abort(self, request_id: RequestId, attempt: int | None = None) -> list[DecodeCommand]:
        """End what is here of a request; with an attempt, only of that one and earlier ones."""
        commands: list[DecodeCommand] = []
        candidate = self._candidates.get(request_id)
        if candidate is not None and (attempt is None or candidate.attempt <= attempt):
            del self._candidates[request_id]
            commands += self._release([candidate.handoff.lease_id] if candidate.handoff is not None else [])
        running = self._running.get(request_id)
        if running is None or (attempt is not None and running.attempt > attempt):
            return commands
        running.is_aborted = True
        if not self._is_iterating:
            self._drop(running)
        return commands

    # --- starting an iteration

    def _start_iteration(self) -> list[DecodeCommand]:
        commands, extensions = self._grow()
        additions = self._admit()
        slices = self._slices()
        if not slices:
            return commands
        for request_id, num_tokens in slices:
            self._running[request_id].num_in_flight = num_tokens
        removals, self._removals = tuple(self._removals), []
        self._is_iterating = True
        return [*commands, RunIteration(removals, additions, extensions, slices)]

    def _grow(self) -> tuple[list[DecodeCommand], tuple[tuple[RequestId, tuple[BlockId, ...]], ...]]:
        """One more block for whoever fills its last one; where there is none, the longest request gives way."""
        commands: list[DecodeCommand] = []
        extensions = []
        for request_id, running in list(self._running.items()):
            if running.context_len <= len(running.block_ids) * self._block_size:
                continue
            while request_id in self._running and (block_ids := self._allocator.allocate(1)) is None:
                commands += self._preempt_longest()
            if request_id in self._running and block_ids is not None:
                running.block_ids += block_ids
                extensions.append((request_id, block_ids))
        return commands, tuple(entry for entry in extensions if entry[0] in self._running)

    def _preempt_longest(self) -> list[DecodeCommand]:
        victim = max(self._running.values(), key=lambda running: (running.context_len, running.request.request_id))
        self._drop(victim)
        generated = tuple(victim.generated_token_ids)
        return self._to_router(RequestPreempted(victim.request.request_id, victim.attempt, generated))

    def _admit(self) -> tuple[Addition, ...]:
        """Candidates that fit, in order. Every running request keeps a block in reserve, so that growing it rarely
        throws out what was just let in."""
        additions = []
        for request_id, candidate in list(self._candidates.items()):
            if len(self._running) >= self._limits.max_running or request_id in self._running:
                break  # full; or an earlier life of it is still ending
            num_blocks = blocks_for(candidate.context_len, self._block_size)
            in_reserve = len(self._running) if self._running else 0
            if num_blocks + in_reserve > self._allocator.num_free:
                break
            block_ids = self._allocator.allocate(num_blocks)
            assert block_ids is not None, "fewer blocks than were counted"
            del self._candidates[request_id]
            additions.append(self._addition(candidate, block_ids))
        return tuple(additions)

    def _addition(self, candidate: Candidate, block_ids: tuple[BlockId, ...]) -> Addition:
        request, handoff = candidate.request, candidate.handoff
        num_computed = handoff.copy.context_len if handoff is not None else 0
        generated = list(candidate.generated_token_ids)
        running = RunningRequest(request, candidate.attempt, generated, list(block_ids), num_computed)
        running.is_prefilling = handoff is None
        self._running[request.request_id] = running
        if handoff is not None:
            self._fetching.append((request.request_id, handoff.lease_id))
        return Addition(request, candidate.generated_token_ids, block_ids, handoff)

    def _slices(self) -> tuple[tuple[RequestId, int], ...]:
        """Every decode, and chunks of prompts in the token budget that the decodes leave."""
        decodes: list[tuple[RequestId, int]] = []
        prompts: list[tuple[RequestId, int]] = []
        for request_id, running in self._running.items():
            remaining = running.num_remaining
            (decodes if remaining == 1 else prompts).append((request_id, remaining))
        # At least one token for prompts: a full batch of decodes must not keep them out for ever.
        budget = max(self._limits.max_tokens - len(decodes), 1)
        return (*decodes, *plan_chunks(prompts, budget)) if prompts else tuple(decodes)

    # --- ending an iteration

    def _iteration_completed(self, event: IterationCompleted) -> list[DecodeCommand]:
        self._is_iterating = False
        commands = self._settle_fetches(frozenset(event.refused))
        for running in self._running.values():
            running.num_computed += running.num_in_flight
            running.num_in_flight = 0
        scored: list[DecodeCommand] = []
        for scores in event.prompt_scores:
            reply_to = self._running[scores.request_id].request.reply_to
            scored.append(SendTo(reply_to, PromptScored(scores.request_id, scores.first_position, scores.entries)))
        deltas: list[tuple[str, TokenDelta]] = []
        for token in event.sampled:
            commands += self._sampled(token, deltas)
        for request_id in event.failed:
            running = self._running[request_id]
            self._drop(running)
            reason = "the model gave no usable logits"
            commands += self._to_router(AttemptFailed(request_id, running.attempt, FailureKind.INTERNAL, reason))
        for running in [running for running in self._running.values() if running.is_aborted]:
            self._drop(running)
        # Scores of a prompt go before its token; reports to router and pool last, nobody waits for them.
        return [*scored, *group_by_gateway(deltas), *commands]

    def _settle_fetches(self, refused: frozenset[RequestId]) -> list[DecodeCommand]:
        """Give the leases back that this iteration has read; a refused handoff is recomputed elsewhere."""
        commands: list[DecodeCommand] = []
        lease_ids = [lease_id for _, lease_id in self._fetching]
        self._num_verified += sum(request_id not in refused for request_id, _ in self._fetching)
        self._fetching = []
        for request_id in sorted(refused):
            running = self._running[request_id]
            self._drop(running, was_added=False)
            if not running.is_aborted:
                generated = tuple(running.generated_token_ids)
                missed = RequestPreempted(request_id, running.attempt, generated, handoff_refused=True)
                commands += self._to_router(missed)
        return commands + self._release(lease_ids)

    def _sampled(self, token: SampledToken, deltas: list[tuple[str, TokenDelta]]) -> list[DecodeCommand]:
        running = self._running[token.request_id]
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
        running.generated_token_ids.append(token.token_id)
        finished = finish_reason(request, token.token_id, index + 1, self._eos_token_ids)
        logprobs = (token.logprob,) if token.logprob is not None else ()
        deltas.append((request.reply_to, TokenDelta(request.request_id, index, (token.token_id,), logprobs, finished)))
        return commands + self._finish(running) if finished is not None else commands

    def _finish(self, running: RunningRequest) -> list[DecodeCommand]:
        self._drop(running)
        num_generated = len(running.generated_token_ids)
        return self._to_router(RequestFinished(running.request.request_id, running.attempt, num_generated))

    def _drop(self, running: RunningRequest, *, was_added: bool = True) -> None:
        request_id = running.request.request_id
        self._allocator.free(running.block_ids)
        del self._running[request_id]
        if was_added:
            self._removals.append(request_id)

    def _missed(self, candidate: Candidate) -> list[DecodeCommand]:
        request_id, generated = candidate.request.request_id, candidate.generated_token_ids
        missed = RequestPreempted(request_id, candidate.attempt, generated, handoff_refused=True)
        return self._to_router(missed)

    # --- reports

    def _release(self, lease_ids: list[LeaseId]) -> list[DecodeCommand]:
        return [Send(self._registered.pool_name, LeasesReleased(tuple(lease_ids)))] if lease_ids else []

    def _to_router(self, message: Message) -> list[DecodeCommand]:
        return [Send(self._router, message)] if self._router is not None else []

    def _report(self) -> list[DecodeCommand]:
        num_candidate_blocks = sum(
            blocks_for(candidate.context_len, self._block_size) for candidate in self._candidates.values()
        )
        load = WorkerLoad(
            num_waiting=0,
            num_running=len(self._running),
            num_candidates=len(self._candidates),
            num_candidate_blocks=num_candidate_blocks,
            num_free_blocks=self._allocator.num_free,
            num_handoffs_verified=self._num_verified,
        )
        if load == self._reported or self._router is None:
            return []
        self._reported = load
        return self._to_router(load)
