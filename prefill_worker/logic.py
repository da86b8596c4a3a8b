"""What a prefill worker decides: which prompts are computed, in which chunks, and how their blocks leave.

The life of a request on a prefill worker:
1. PrefillRequest: it waits, in the router's order (real-time first where a policy paces), until blocks for its whole
   context are free. One that comes again then asks the pool: a copy of an earlier attempt is loaded, and only what
   came after it is computed.
2. Iterations compute it in chunks under the token budget; the last chunk samples the next token.
3. The token goes to the gateway at once. If the answer is over with it, the blocks are freed: RequestFinished.
4. Otherwise PrefillCompleted goes to the router and ReserveBlocks to the pool; or, when it is urgent, to the decode
   worker that the router named (about its candidate buffer here), and then to the pool for a copy.
5. BlocksReserved: the blocks are copied beside the running iteration. BlocksWritten offers the request;
   with BlocksTaken it is its receiver's, and the blocks here are freed.
A lost router has forgotten or taken over whatever we had, so its return empties this worker. A lost pool or decode
worker takes with it what was offered and not yet acknowledged (RequestPreempted: only the router can know); jobs that
were leaving for a lost pool reserve again when it is back. Work for the decode workers' buffers is in buffers.py.
"""

from alignedserve.core.block_allocator import BlockAllocator, blocks_for
from alignedserve.core.ids import LeaseId, RequestId
from alignedserve.core.request import FinishReason
from alignedserve.messages.caches import (
    ArenaOffered,
    BlocksReserved,
    BlocksTaken,
    CancelPrefetch,
    CancelReservation,
    CopyGranted,
    CopyMissing,
    FetchCopy,
    LeasesReleased,
    PrefetchBlocks,
    ReservationRefused,
    ReturnRequest,
)
from alignedserve.messages.events import CommonEvent, PeerConnected, PeerDisconnected, Received, Send, SendTo, Ticked
from alignedserve.messages.fields import FailureKind
from alignedserve.messages.gateways import AbortRequest, PromptScored, TokenDelta
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    Addition,
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    IterationCompleted,
    Load,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    RelayBlocks,
    RunIteration,
    group_by_gateway,
)
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import (
    AttemptFailed,
    PrefillCompleted,
    PrefillRequest,
    RequestFinished,
    RequestPreempted,
    SetPredictedLength,
    WorkerLoad,
    WorkerRegistered,
)
from alignedserve.scheduling.iteration_scheduler import Pacing
from prefill_worker.candidate_buffers import BufferOpened, CandidateBuffers, CloseBuffer, OpenBuffer
from prefill_worker.departure import JobEnd, Leaving, LeavingStep
from prefill_worker.state import JobStage, PrefillJob, set_predicted_length, waiting_jobs

CopyEvent = BlocksLoaded | BlocksOffloaded | BlocksRelayed
PrefillEvent = CommonEvent | IterationCompleted | CopyEvent | BufferOpened
WorkCommand = RunIteration | LoadBlocks | OffloadBlocks | RelayBlocks | MapArena | OpenBuffer | CloseBuffer
PrefillCommand = Send | SendTo | WorkCommand


class PrefillLogic:
    """Jobs, this worker's blocks, and the one iteration that is in flight at a time."""

    def __init__(
        self, *, registered: WorkerRegistered, max_running_requests: int, pacing: Pacing, eos_token_ids: frozenset[int]
    ) -> None:
        """`max_running_requests`: jobs that hold blocks. `pacing`: which of them compute how much in an iteration."""
        self._registered = registered
        self._max_running_requests = max_running_requests
        self._pacing = pacing
        self._eos_token_ids = eos_token_ids
        self._allocator = BlockAllocator(registered.num_blocks)
        self._jobs: dict[RequestId, PrefillJob] = {}
        self._buffers = CandidateBuffers(registered.pool_name)
        self._additions: dict[RequestId, Addition] = {}  # loaded, to enter with the next iteration
        self._removals: list[RequestId] = []
        self._num_reused_tokens = self._num_recomputed_tokens = 0  # of requests given out before
        self._running_since_s: float | None = None  # the iteration that runs
        self._leaving = Leaving(self._buffers)
        self._router: str | None = None
        self._pool: str | None = None
        self._reported: WorkerLoad | None = None

    def on_event(self, event: PrefillEvent, now: float) -> list[PrefillCommand]:
        """Same state, event and now always give the same commands. Touches nothing outside self."""
        self._now = now
        commands = self._handle(event)
        # The next iteration first: it computes while the messages about the last one are sent.
        started = [] if self._running_since_s is not None else self._start_iteration()
        return [*started, *commands, *self._report()]

    def _handle(self, event: PrefillEvent) -> list[PrefillCommand]:
        match event:
            case IterationCompleted():
                return self._iteration_completed(event)
            case BlocksLoaded():
                return self._loaded(event)
            case BlocksOffloaded():
                job = self._jobs[event.command.request_id]
                return self._departed(job, self._leaving.offloaded(job, event))
            case BlocksRelayed():
                return [*self._buffers.relayed(event)]
            case BufferOpened():
                return [*self._buffers.opened(event)]
            case Received(peer, message):
                return self._on_message(peer, message)
            case PeerConnected(role, peer):
                return self._on_linked(role, peer)
            case PeerDisconnected(role, peer):
                return self._on_lost(role, peer)
            case Ticked():
                return []

    # --- peers and messages

    def _on_linked(self, role: Role, peer: str) -> list[PrefillCommand]:
        if role is Role.DECODE_WORKER:
            return [*self._buffers.linked(peer)]
        if role is not Role.ROUTER:
            return []
        self._router = peer
        self._reported = None
        commands: list[PrefillCommand] = [Send(peer, self._registered)]
        for request_id in list(self._jobs):
            commands += self._abort(request_id)
        return commands

    def _on_lost(self, role: Role, peer: str) -> list[PrefillCommand]:
        commands: list[PrefillCommand] = []
        if peer == self._pool:
            self._pool = self._leaving.pool = None
            commands += self._buffers.pool_lost()
            for job in [job for job in self._jobs.values() if job.stage is JobStage.ASKING]:
                self._enter(job, 0)
        elif role is Role.DECODE_WORKER:
            commands += self._buffers.lost(peer)
        for job in [job for job in self._jobs.values() if job.target == peer]:
            commands += self._departed(job, self._leaving.target_lost(job))
        return commands

    def _on_message(self, peer: str, message: Message) -> list[PrefillCommand]:
        match message:
            case PrefillRequest():
                return self._begin(message)
            case SetPredictedLength(request_id=request_id):
                set_predicted_length(self._jobs.get(request_id), message)
                self._pacing.set_predicted_length(request_id, message.predicted_output_len)
                return []
            case AbortRequest():
                return self._abort(message.request_id, message.attempt)
            case ArenaOffered():
                return self._map_arena(peer, message)
            case BlocksReserved() | BlocksTaken() | ReservationRefused():
                return self._answered(peer, message)
            case CopyGranted():
                return self._copy_granted(message)
            case CopyMissing():
                return self._copy_missing(message)
            case PrefetchBlocks():
                return [*self._buffers.prefetch(peer, message)]
            case CancelPrefetch():
                return [*self._buffers.cancel(peer, message)]
            case ReturnRequest():
                return [*self._buffers.bring_back(peer, message)]
        raise AssertionError(f"a prefill worker does not take {type(message).__name__}")

    def _begin(self, message: PrefillRequest) -> list[PrefillCommand]:
        request = message.request
        # What an earlier attempt left here is stale: word from whoever took it is still on the way.
        commands = self._abort(request.request_id, message.attempt - 1)
        job = PrefillJob.of(message)
        if self._num_blocks(job.num_tokens) > self._registered.num_blocks:
            # It would wait for ever, and everybody behind it.
            reason = "its context needs more cache blocks than a prefill worker has"
            failed = AttemptFailed(request.request_id, message.attempt, FailureKind.UNSERVABLE, reason)
            return commands + self._to_router(failed)
        if (earlier := self._jobs.get(request.request_id)) is not None:
            earlier.successor = message
            return commands
        self._jobs[request.request_id] = job
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
        is_computing = job.stage is JobStage.COMPUTING and self._running_since_s is not None
        return [] if is_computing or job.is_copying else self._end(job)

    def _map_arena(self, peer: str, offered: ArenaOffered) -> list[PrefillCommand]:
        commands: list[PrefillCommand] = [MapArena(peer, offered)]
        self._pool = self._leaving.pool = peer
        self._buffers.pool_linked()
        for job in [job for job in self._jobs.values() if job.stage is JobStage.LEAVING]:
            if job.target is None and not job.is_copying:
                commands += self._departed(job, self._leaving.begin(job))
        return commands

    # --- beginning from a copy

    def _copy_granted(self, message: CopyGranted) -> list[PrefillCommand]:
        handoff = message.handoff
        job = self._jobs.get(handoff.request.request_id)
        if job is None or job.attempt != message.attempt or job.stage is not JobStage.ASKING:
            return self._release(handoff.lease_id)
        # A copy of more blocks than the job has would not fit into them.
        does_fit = self._num_blocks(handoff.copy.context_len) <= len(job.block_ids)
        if not does_fit or not job.num_usable(handoff):
            self._enter(job, 0)
            return self._release(handoff.lease_id)
        job.stage, job.handoff, job.is_copying = JobStage.LOADING, handoff, True
        load = Load(job.request.request_id, handoff.copy, job.block_ids)
        return [LoadBlocks(self._registered.pool_name, (load,))]

    def _copy_missing(self, message: CopyMissing) -> list[PrefillCommand]:
        job = self._jobs.get(message.request_id)
        if job is not None and job.attempt == message.attempt and job.stage is JobStage.ASKING:
            self._enter(job, 0)
        return []

    def _loaded(self, event: BlocksLoaded) -> list[PrefillCommand]:
        commands: list[PrefillCommand] = []
        for load in event.loads:
            job = self._jobs[load.request_id]
            handoff, job.handoff = job.handoff, None
            assert handoff is not None, "loaded without a copy"
            job.is_copying = False
            commands += self._release(handoff.lease_id)
            if job.is_aborted:
                commands += self._end(job)
            else:
                self._enter(job, 0 if load.request_id in event.refused else job.num_usable(handoff))
        return commands

    def _release(self, lease_id: LeaseId) -> list[PrefillCommand]:
        return [Send(self._pool, LeasesReleased((lease_id,)))] if self._pool is not None else []

    # --- iterations

    def _start_iteration(self) -> list[PrefillCommand]:
        asked = self._admit()
        slices = self._pacing.choose(self._now)
        if not slices:
            return asked
        additions, self._additions = tuple(self._additions.values()), {}
        removals, self._removals = tuple(self._removals), []
        self._running_since_s = self._now
        return [RunIteration(removals, additions, (), slices), *asked]

    def _admit(self) -> list[PrefillCommand]:
        """Blocks for the next jobs, in order; nobody overtakes a job that does not fit yet.

        Only with blocks of its own a job asks for the pool's copy: one that is granted is not given up for room.
        """
        asked: list[PrefillCommand] = []
        num_holding = sum(bool(job.block_ids) for job in self._jobs.values())
        for job in waiting_jobs(self._jobs.values(), real_time_first=self._pacing.lets_real_time_by):
            is_full = num_holding >= self._max_running_requests
            block_ids = None if is_full else self._allocator.allocate(self._num_blocks(job.num_tokens))
            if block_ids is None:
                break
            num_holding += 1
            job.block_ids = block_ids
            if job.has_copy and self._pool is not None:
                job.stage = JobStage.ASKING
                asked.append(Send(self._pool, FetchCopy(job.request.request_id, job.attempt)))
            else:
                self._enter(job, 0)
        return asked

    def _num_blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self._registered.block_size)

    def _enter(self, job: PrefillJob, num_cached: int) -> None:
        job.stage = JobStage.COMPUTING
        generated, predicted = len(job.generated_token_ids), job.predicted_output_len
        self._pacing.enter(
            job.request, self._now, num_cached=num_cached, num_generated=generated, predicted_len=predicted
        )
        if job.is_retry:
            self._num_reused_tokens += num_cached
            self._num_recomputed_tokens += job.num_tokens - num_cached
        addition = Addition(job.request, job.generated_token_ids, job.block_ids, num_cached)
        self._additions[job.request.request_id] = addition

    def _iteration_completed(self, event: IterationCompleted) -> list[PrefillCommand]:
        assert self._running_since_s is not None, "an iteration ended that was not started"
        self._pacing.completed(self._now, event.duration_s(self._running_since_s, self._now))
        self._running_since_s = None
        commands: list[PrefillCommand] = []
        scored: list[PrefillCommand] = []
        for scores in event.prompt_scores:
            reply_to = self._jobs[scores.request_id].request.reply_to
            scored.append(SendTo(reply_to, PromptScored(scores.request_id, scores.first_position, scores.entries)))
        deltas: list[tuple[str, TokenDelta]] = []
        for token in event.sampled:
            job = self._jobs[token.request_id]
            if not job.is_aborted:
                delta = job.sampled(token, self._eos_token_ids)
                deltas.append((job.request.reply_to, delta))
                commands += self._computed(job, delta.finish_reason)
        for request_id in event.failed:
            commands += self._fail(request_id, FailureKind.INTERNAL, "the model gave no usable logits")
        for job in [job for job in self._jobs.values() if job.is_aborted and not job.is_copying]:
            commands += self._end(job)
        # Scores of a prompt go before its token; reports to router and pool last, nobody waits for them.
        return [*scored, *group_by_gateway(deltas), *commands]

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
        self._pacing.leave(request_id)
        return commands + self._departed(job, self._leaving.begin(job))

    # --- leaving for the pool, or for a decode worker

    def _answered(self, peer: str, message: BlocksReserved | BlocksTaken | ReservationRefused) -> list[PrefillCommand]:
        """Word of a job that leaves; or of a request on its way back from a buffer; or stale."""
        job = self._jobs.get(message.request_id)
        if job is None or not job.is_leaving_for(peer, message.attempt):
            return [*self._buffers.answered(message)]
        return self._departed(job, self._leaving.answered(job, message))

    def _departed(self, job: PrefillJob, step: LeavingStep) -> list[PrefillCommand]:
        match step.end:
            case None:
                return [*step.commands]
            case JobEnd.GONE:
                return [*step.commands, *self._forget(job)]
            case JobEnd.UNKNOWN:
                preempted = RequestPreempted(job.request.request_id, job.attempt, job.generated_token_ids)
                return self._to_router(preempted) + self._forget(job)
            case JobEnd.DROPPED:
                return [*step.commands, *self._end(job)]
            case JobEnd.TOO_LARGE:
                return self._fail(job.request.request_id, FailureKind.UNSERVABLE, "the KV pool is too small for it")

    # --- ends

    def _fail(self, request_id: RequestId, kind: FailureKind, reason: str) -> list[PrefillCommand]:
        job = self._jobs[request_id]
        return self._end(job) + self._to_router(AttemptFailed(request_id, job.attempt, kind, reason))

    def _end(self, job: PrefillJob) -> list[PrefillCommand]:
        """Drop a job that nobody computes or copies any more."""
        request_id = job.request.request_id
        commands = self._release(job.handoff.lease_id) if job.handoff is not None else []
        was_added = self._additions.pop(request_id, None) is None and job.stage is JobStage.COMPUTING
        if was_added and request_id not in self._removals:
            self._removals.append(request_id)
        if job.target is not None:
            commands.append(Send(job.target, CancelReservation(request_id, job.attempt)))
        return commands + self._forget(job)

    def _forget(self, job: PrefillJob) -> list[PrefillCommand]:
        self._pacing.leave(job.request.request_id)
        self._allocator.free(job.block_ids)
        del self._jobs[job.request.request_id]
        return self._begin(job.successor) if job.successor is not None else []

    # --- reports

    def _to_router(self, message: Message) -> list[PrefillCommand]:
        return [Send(self._router, message)] if self._router is not None else []

    def _report(self) -> list[PrefillCommand]:
        num_waiting = sum(not job.block_ids for job in self._jobs.values())
        counts = (self._num_reused_tokens, self._num_recomputed_tokens)
        load = WorkerLoad(num_waiting, len(self._jobs) - num_waiting, 0, 0, 0, self._allocator.num_free, 0, 0, *counts)
        if load == self._reported or self._router is None:
            return []
        self._reported = load
        return self._to_router(load)
