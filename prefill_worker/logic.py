"""What a prefill worker decides: which prompts are computed, in which chunks, and how their blocks leave.

The life of a request on a prefill worker:
1. PrefillRequest: it waits, in the router's order, until blocks for its whole context are free.
2. Iterations compute it in chunks under the token budget; the last chunk samples the next token.
3. The token goes to the gateway at once. If the answer is over with it, the blocks are freed: RequestFinished.
4. Otherwise PrefillCompleted goes to the router and ReserveBlocks to the pool.
5. BlocksReserved: the blocks are copied beside the running iteration. BlocksWritten offers the request to the pool;
   with BlocksTaken it is the pool's, and the blocks here are freed.
A lost router has forgotten or taken over whatever we had, so its return empties this worker. A lost pool takes with it
what was offered and not yet acknowledged (RequestPreempted); jobs that were leaving reserve again when it is back.
"""

from dataclasses import dataclass

from alignedserve.core.blocks import BlockAllocator, blocks_for
from alignedserve.core.ids import RequestId
from alignedserve.core.progress import finish_reason, plan_chunks
from alignedserve.core.request import FinishReason, SampledToken
from alignedserve.messages.events import CommonEvent, PeerLinked, PeerLost, Received, Send, SendTo, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    Addition,
    IterationCompleted,
    MapArena,
    OffloadBlocks,
    RunIteration,
    group_by_gateway,
)
from alignedserve.messages.links import (
    AbortRequest,
    ArenaOffered,
    AttemptFailed,
    BlockRun,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelReservation,
    FailureKind,
    PrefillCompleted,
    PrefillRequest,
    PromptScored,
    RequestFinished,
    RequestPreempted,
    ReservationRefused,
    ReserveBlocks,
    TokenDelta,
    WorkerLoad,
    WorkerRegistered,
)
from alignedserve.messages.wire import Message
from prefill_worker.state import JobStage, PrefillJob


@dataclass(frozen=True, slots=True)
class OffloadCompleted:
    """Event: the copy is done; `runs` is None when the lease did not hold."""

    request_id: RequestId
    reserved: BlocksReserved
    runs: tuple[BlockRun, ...] | None


PrefillEvent = CommonEvent | IterationCompleted | OffloadCompleted
PrefillCommand = Send | SendTo | RunIteration | OffloadBlocks | MapArena


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """What bounds an iteration."""

    max_tokens: int  # per iteration
    max_running: int  # jobs that hold blocks


class PrefillLogic:
    """Jobs, this worker's blocks, and the one iteration that is in flight at a time."""

    def __init__(self, *, registered: WorkerRegistered, limits: PrefillLimits, eos_token_ids: frozenset[int]) -> None:
        self._registered = registered
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._allocator = BlockAllocator(registered.num_blocks)
        self._jobs: dict[RequestId, PrefillJob] = {}
        self._removals: list[RequestId] = []
        self._is_running = False
        self._router: str | None = None
        self._pool: str | None = None
        self._reported: WorkerLoad | None = None

    def on_event(self, event: PrefillEvent, now: float) -> list[PrefillCommand]:
        """Same state, event and now always give the same commands. Touches nothing outside self."""
        commands = self._handle(event)
        # The next iteration first: it computes while the messages about the last one are sent.
        started = [] if self._is_running else self._start_iteration()
        return [*started, *commands, *self._report()]

    def _handle(self, event: PrefillEvent) -> list[PrefillCommand]:
        match event:
            case IterationCompleted():
                return self._iteration_completed(event)
            case OffloadCompleted():
                return self._offload_completed(event)
            case Received(_, message):
                return self._on_message(message)
            case PeerLinked(role, peer):
                return self._on_linked(role, peer)
            case PeerLost(_, peer):
                return self._on_pool_lost() if peer == self._pool else []
            case Ticked():
                return []

    # --- peers and messages

    def _on_linked(self, role: Role, peer: str) -> list[PrefillCommand]:
        if role is not Role.ROUTER:
            return []
        self._router = peer
        self._reported = None
        commands: list[PrefillCommand] = [Send(peer, self._registered)]
        for request_id in list(self._jobs):
            commands += self._abort(request_id)
        return commands

    def _on_pool_lost(self) -> list[PrefillCommand]:
        """What was offered may or may not have been taken and passed on; only the router can know."""
        self._pool = None
        commands: list[PrefillCommand] = []
        for request_id, job in list(self._jobs.items()):
            if job.is_written:
                commands += self._to_router(RequestPreempted(request_id, job.attempt, job.generated_token_ids))
                self._forget(job)
        return commands

    def _on_message(self, message: Message) -> list[PrefillCommand]:
        match message:
            case PrefillRequest():
                return self._begin(message)
            case AbortRequest():
                return self._abort(message.request_id, message.attempt)
            case ArenaOffered():
                return self._map_arena(message)
            case BlocksReserved():
                return self._reserved(message)
            case BlocksTaken():
                return self._taken(message)
            case ReservationRefused():
                return self._refused(message)
            case _:
                raise AssertionError(f"a prefill worker does not take {type(message).__name__}")

    def _begin(self, message: PrefillRequest) -> list[PrefillCommand]:
        request = message.request
        # What an earlier attempt left here is stale: word from the pool that took it is still on the way.
        commands = self._abort(request.request_id, message.attempt - 1)
        generated = message.generated_token_ids
        num_tokens = request.prompt_len + len(generated)
        if blocks_for(num_tokens, self._registered.block_size) > self._registered.num_blocks:
            # It would wait for ever, and everybody behind it.
            reason = "its context needs more cache blocks than a prefill worker has"
            failed = AttemptFailed(request.request_id, message.attempt, FailureKind.UNSERVABLE, reason)
            return commands + self._to_router(failed)
        earlier = self._jobs.get(request.request_id)
        if earlier is not None:
            earlier.successor = message
            return commands
        self._jobs[request.request_id] = PrefillJob(request, message.attempt, generated, num_tokens)
        return commands

    def _abort(self, request_id: RequestId, attempt: int | None = None) -> list[PrefillCommand]:
        """End a job; with an attempt, only if it is of that attempt or an earlier one."""
        job = self._jobs.get(request_id)
        if job is None:
            return []
        if job.successor is not None and (attempt is None or job.successor.attempt <= attempt):
            job.successor = None
        if attempt is not None and job.attempt > attempt:
            return []
        job.is_aborted = True
        is_busy = job.is_copying or (job.stage is JobStage.COMPUTING and self._is_running)
        return [] if is_busy else self._end(job)

    def _map_arena(self, offered: ArenaOffered) -> list[PrefillCommand]:
        commands: list[PrefillCommand] = [MapArena(offered)]
        self._pool = self._registered.pool_name
        leaving = [job for job in self._jobs.values() if job.stage is JobStage.LEAVING and not job.is_copying]
        return commands + [self._reserve(job) for job in leaving]

    # --- iterations

    def _start_iteration(self) -> list[PrefillCommand]:
        additions = self._admit()
        computing = [job for job in self._jobs.values() if job.stage is JobStage.COMPUTING]
        remaining = [(job.request.request_id, job.num_remaining) for job in computing]
        slices = plan_chunks(remaining, self._limits.max_tokens)
        if not slices:
            return []
        removals, self._removals = tuple(self._removals), []
        self._is_running = True
        for request_id, num_tokens in slices:
            self._jobs[request_id].num_remaining -= num_tokens
        return [RunIteration(removals, additions, (), slices)]

    def _admit(self) -> tuple[Addition, ...]:
        """Blocks for the next jobs, in order; nobody overtakes a job that does not fit yet."""
        additions = []
        num_holding = sum(job.stage is not JobStage.WAITING for job in self._jobs.values())
        for job in [job for job in self._jobs.values() if job.stage is JobStage.WAITING]:
            num_blocks = blocks_for(job.num_remaining, self._registered.block_size)
            block_ids = self._allocator.allocate(num_blocks) if num_holding < self._limits.max_running else None
            if block_ids is None:
                break
            num_holding += 1
            job.stage = JobStage.COMPUTING
            job.block_ids = block_ids
            additions.append(Addition(job.request, job.generated_token_ids, block_ids))
        return tuple(additions)

    def _iteration_completed(self, event: IterationCompleted) -> list[PrefillCommand]:
        self._is_running = False
        commands: list[PrefillCommand] = []
        scored: list[PrefillCommand] = []
        for scores in event.prompt_scores:
            reply_to = self._jobs[scores.request_id].request.reply_to
            scored.append(SendTo(reply_to, PromptScored(scores.request_id, scores.first_position, scores.entries)))
        deltas: list[tuple[str, TokenDelta]] = []
        for token in event.sampled:
            job = self._jobs[token.request_id]
            if not job.is_aborted:
                delta = self._delta(job, token)
                deltas.append((job.request.reply_to, delta))
                commands += self._computed(job, delta.finish_reason)
        for request_id in event.failed:
            commands += self._fail(request_id, FailureKind.INTERNAL, "the model gave no usable logits")
        for job in [job for job in self._jobs.values() if job.is_aborted and not job.is_copying]:
            commands += self._end(job)
        # Scores of a prompt go before its token; reports to router and pool last, nobody waits for them.
        return [*scored, *group_by_gateway(deltas), *commands]

    def _delta(self, job: PrefillJob, token: SampledToken) -> TokenDelta:
        index = len(job.generated_token_ids)
        request_id = job.request.request_id
        if job.request.sampling.max_tokens == 0:  # only the prompt was to be scored
            return TokenDelta(request_id, index, (), (), FinishReason.LENGTH)
        job.generated_token_ids = (*job.generated_token_ids, token.token_id)
        finished = finish_reason(job.request, token.token_id, index + 1, self._eos_token_ids)
        logprobs = (token.logprob,) if token.logprob is not None else ()
        return TokenDelta(request_id, index, (token.token_id,), logprobs, finished)

    def _computed(self, job: PrefillJob, finished: FinishReason | None) -> list[PrefillCommand]:
        request_id = job.request.request_id
        num_generated = len(job.generated_token_ids)
        # Reported in any case: the router counts what this worker has still to compute.
        num_tokens = job.request.prompt_len + max(num_generated - 1, 0)
        commands = self._to_router(PrefillCompleted(request_id, job.attempt, num_tokens))
        self._removals.append(request_id)
        if finished is not None:
            return commands + self._end(job) + self._to_router(RequestFinished(request_id, job.attempt, num_generated))
        job.stage = JobStage.LEAVING
        return [*commands, self._reserve(job)] if self._pool is not None else commands

    # --- leaving for the pool

    def _reserve(self, job: PrefillJob) -> PrefillCommand:
        assert self._pool is not None, "a reservation without a pool"
        return Send(self._pool, ReserveBlocks(job.request.request_id, job.attempt, len(job.block_ids)))

    def _reserved(self, reserved: BlocksReserved) -> list[PrefillCommand]:
        job = self._jobs.get(reserved.request_id)
        if job is None or job.attempt != reserved.attempt or job.stage is not JobStage.LEAVING or job.is_copying:
            return []
        job.is_copying = True
        return [OffloadBlocks(reserved.request_id, job.block_ids, reserved)]

    def _offload_completed(self, event: OffloadCompleted) -> list[PrefillCommand]:
        job = self._jobs[event.request_id]
        job.is_copying = False
        if job.is_aborted:
            return self._end(job)
        if self._pool is None:
            return []  # it reserves again when the pool is back
        if event.runs is None:
            return [self._reserve(job)]
        reserved = event.reserved
        written = BlocksWritten(
            reserved.lease_id,
            reserved.generation,
            event.runs,
            job.context_len,
            job.attempt,
            job.request,
            job.generated_token_ids,
        )
        job.is_written = True
        return [Send(self._pool, written)]

    def _taken(self, message: BlocksTaken) -> list[PrefillCommand]:
        job = self._jobs.get(message.request_id)
        if job is None or job.attempt != message.attempt or job.stage is not JobStage.LEAVING or job.is_copying:
            return []
        if not message.is_accepted:
            job.is_written = False
            return [self._reserve(job)]
        self._forget(job)
        return []

    def _refused(self, message: ReservationRefused) -> list[PrefillCommand]:
        job = self._jobs.get(message.request_id)
        if job is None or job.attempt != message.attempt or job.stage is not JobStage.LEAVING or job.is_copying:
            return []
        return self._fail(message.request_id, FailureKind.UNSERVABLE, "the KV pool is too small for it")

    # --- ends

    def _fail(self, request_id: RequestId, kind: FailureKind, reason: str) -> list[PrefillCommand]:
        job = self._jobs.get(request_id)
        if job is None:
            return []
        return self._end(job) + self._to_router(AttemptFailed(request_id, job.attempt, kind, reason))

    def _end(self, job: PrefillJob) -> list[PrefillCommand]:
        """Drop a job that nobody computes or copies any more."""
        request_id = job.request.request_id
        was_leaving = job.stage is JobStage.LEAVING
        if job.stage is JobStage.COMPUTING and request_id not in self._removals:
            self._removals.append(request_id)
        self._forget(job)
        if self._pool is None or not was_leaving:
            return []
        return [Send(self._pool, CancelReservation(request_id, job.attempt))]

    def _forget(self, job: PrefillJob) -> None:
        self._allocator.free(job.block_ids)
        del self._jobs[job.request.request_id]
        if job.successor is not None:
            self._begin(job.successor)

    # --- reports

    def _to_router(self, message: Message) -> list[PrefillCommand]:
        return [Send(self._router, message)] if self._router is not None else []

    def _report(self) -> list[PrefillCommand]:
        num_waiting = sum(job.stage is JobStage.WAITING for job in self._jobs.values())
        load = WorkerLoad(num_waiting, len(self._jobs) - num_waiting, 0, 0, self._allocator.num_free, 0)
        if load == self._reported or self._router is None:
            return []
        self._reported = load
        return self._to_router(load)
