"""Decisions of a prefill worker: which prompts are computed, in which chunks, and where their blocks go.

The life of a request on a prefill worker:
1. PrefillRequest: it waits, in the router's order (real-time first if a policy schedules iterations), until blocks for
   its whole context are free. Earlier prompts may have left its first blocks cached here. A retry asks the pool
   instead: a copy of an earlier attempt is loaded. Only the tokens after that are computed.
2. Iterations compute it in chunks under the token budget; the last chunk samples the next token.
3. The token goes to the gateway at once. If it completes the answer, the blocks are freed: RequestFinished.
4. Otherwise PrefillCompleted goes to the router and ReserveBlocks to the pool; or, when it is urgent, to the decode
   worker that the router named (about its candidate buffer here), and then to the pool for a copy.
5. BlocksReserved: the blocks are copied beside the running iteration. BlocksWritten offers the request;
   with BlocksTaken it is its receiver's, and the blocks here are freed. What a decode worker took is then offered to
   the pool as a copy, which is dropped if the pool is full; what it did not take goes to the pool.
A returning router knows none of this worker's jobs, so they are aborted. Jobs offered to a pool or decode worker that
is lost before it acknowledged them are preempted (RequestPreempted: only the router can know); jobs that were departing
to a lost pool reserve again when it is back. A copy that fails twice is tried again by ticks, as this worker may lack
descriptors for a moment; a job whose copy fails again and again is preempted. Candidate buffers are in
candidate_buffers.py.
"""

from dataclasses import dataclass

import msgspec
from typing_extensions import override

from alignedserve.config.sections import PrefillWorkerConfig, PrefixCacheConfig, SchedulingConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import LeaseId, RequestId
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel
from alignedserve.messages.caches import (
    ArenaOffered,
    BlocksReserved,
    BlocksTaken,
    CopyGranted,
    CopyMissing,
    FetchCopy,
    Handoff,
    LeasesReleased,
    ReservationRefused,
)
from alignedserve.messages.events import PeerDisconnected, Received, Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    Addition,
    BlocksLoaded,
    BlocksOffloaded,
    IterationCompleted,
    Load,
    LoadBlocks,
    MapArena,
    RunIteration,
)
from alignedserve.messages.workers import PrefillRequest, SetPredictedLength, WorkerLoad, WorkerRegistered
from alignedserve.prefix_cache.cached_blocks import budget_of
from alignedserve.prefix_cache.contexts import PrefixCache
from alignedserve.scheduling.factory import limits_of, make_iteration_scheduler, measured_speed
from alignedserve.scheduling.iteration_scheduler import IterationScheduler, Slices
from alignedserve.worker_core.handoff import Contents, HandoffEnd, Outgoing, Sender
from alignedserve.worker_core.part import Commands, WorkerCommand, WorkerEvent
from alignedserve.worker_core.request import CacheStage
from alignedserve.worker_core.request_notes import Phases, WaitingRequest
from alignedserve.worker_core.router_link import with_speed
from alignedserve.worker_core.worker_logic import WorkerLogic
from prefill_worker.candidate_buffers import CandidateBuffers, PlaceOrder
from prefill_worker.job_blocks import JobBlocks
from prefill_worker.state import PrefillJob, waiting_cause

_MOST_COPIES = 8  # that fail, of one request: the pool's memory is out of this worker's reach, perhaps not of another's


@dataclass(slots=True, eq=False)
class DepartingJob(Outgoing):
    """One job that leaves."""

    job: PrefillJob


class PrefillLogic(WorkerLogic[PrefillJob]):
    """Jobs, this worker's blocks, and the one iteration that is in flight at a time."""

    phases = Phases.PREFILL
    kind = "prefill worker"

    def __init__(
        self,
        *,
        registered: WorkerRegistered,
        max_running_requests: int,
        scheduler: IterationScheduler,
        eos_token_ids: frozenset[int],
        prefixes: PrefixCache | None = None,
        state_blocks: int = 0,
    ) -> None:
        """`max_running_requests`: jobs that hold blocks. `scheduler`: which of them compute how much in an iteration.
        `prefixes`: the prefix cache in the worker's blocks, empty; None: there is none. `state_blocks`: of every
        request, before those of its tokens."""
        super().__init__(registered, eos_token_ids)
        self._max_running_requests = max_running_requests
        self._scheduler = scheduler
        self._order = PlaceOrder(knows_classes=scheduler.prioritizes_real_time, floor=scheduler.best_effort_floor)
        self._blocks = JobBlocks(registered.num_blocks, registered.block_size, prefixes, state_blocks=state_blocks)
        self._in_flight: list[Slices] = []  # of iterations that have begun, an urgent one last
        self._by_id = self._jobs = dict[RequestId, PrefillJob]()
        self._buffers = CandidateBuffers(registered.pool_name)
        self._parts = (self._buffers,)
        self._additions: dict[RequestId, Addition] = {}  # entering with the next iteration
        self._removals: list[RequestId] = []
        self._num_reused_tokens = self._num_recomputed_tokens = 0  # of retried requests
        self._pool: str | None = None
        self._sender: Sender[DepartingJob] = Sender(
            reserved=lambda entry: [self._sender.copy(entry, tuple(entry.job.block_ids))],
            contents=_contents_of,
            ended=self._left,
            aborted=lambda entry: self._forget(entry.job),
        )

    @override
    def _on_other(self, event: WorkerEvent, now: float) -> Commands:
        match event:
            case BlocksLoaded():
                return self._loaded(event, now)
            case BlocksOffloaded():
                return self._sender.copied(event, now)
            case PeerDisconnected(role, peer):
                return self._disconnected(role, peer, now)
            case Received(peer, ArenaOffered() as offered):
                self._pool = peer
                self._buffers.pool_connected()
                return [MapArena(peer, offered), *self._tick(now)]
            case Received(peer, BlocksReserved() | BlocksTaken() | ReservationRefused() as answer):
                # About a job, or what comes back from a buffer.
                departing = self._sender.answered(peer, answer, now)
                return [*departing, *self._buffers.returns.answered(peer, answer, now)]
            case Received(_, CopyGranted() as granted):
                return self._copy_granted(granted, now)
            case Received(_, CopyMissing() as missing):
                return self._copy_missing(missing, now)
        return super()._on_other(event, now)

    @override
    def _router_connected(self, peer: str, now: float) -> Commands:
        commands: list[WorkerCommand] = [*self._router.connected(peer)]
        if (cached := self._blocks.all_cached()) is not None:
            commands += self._router.send(cached)
        for request_id in list(self._jobs):
            commands += self._abort(request_id)
        return commands

    def _disconnected(self, role: Role, peer: str, now: float) -> Commands:
        commands: list[WorkerCommand] = []
        if peer == self._pool:
            self._pool = None
            commands += self._buffers.pool_disconnected(now)
            for job in [job for job in self._jobs.values() if job.stage is CacheStage.ASKING]:
                self._enter(job, 0, now)
        elif role is Role.DECODE_WORKER:
            commands += self._buffers.disconnected(peer)
        return [*commands, *self._sender.lost(peer, now)]

    # --- a job comes, and is given up

    @override
    def _never_fits(self, message: PrefillRequest) -> bool:
        context_len = message.request.prompt_len + len(message.generated_token_ids)
        return self._blocks.blocks_for(context_len) > self._registered.num_blocks

    @override
    def _add(self, message: PrefillRequest, now: float, *, is_new: bool) -> Commands:
        self._jobs[message.request.request_id] = job = PrefillJob.of(message, now)
        self._came(job)
        return ()

    @override
    def _set_predicted_length(self, message: SetPredictedLength) -> None:
        job = self._jobs.get(message.request_id)
        if job is not None and job.set_predicted_length(message):
            self._scheduler.set_predicted_length(message.request_id, message.predicted_output_len)

    @override
    def _abort(self, request_id: RequestId, attempt: int | None = None) -> Commands:
        job = self._jobs.get(request_id)
        if job is None or not job.abort(attempt):
            return ()
        if (leaving := self._sender.get(request_id)) is not None:
            return self._sender.abort(leaving)
        is_computing = job.stage is CacheStage.HERE and self._is_computing
        return () if is_computing or job.is_copying else self._end(job)

    @override
    def _tick(self, now: float) -> Commands:
        departing = [job for job in self._jobs.values() if job.stage is CacheStage.LEAVING and job.leaving is None]
        return [command for job in departing for command in self._leave(job)]

    def _leave(self, job: PrefillJob) -> Commands:
        is_bypass = job.bypass_to is not None and self._buffers.lender.lends_to(job.bypass_to)
        target = job.bypass_to if is_bypass else self._pool
        if target is None:
            return self._forget(job) if job.is_taken else ()
        job.leaving = entry = DepartingJob(job.request, job.attempt, target, job)
        kind = {"is_copy": job.is_taken, "may_wait": not job.is_taken, "is_best_effort": not job.is_real_time}
        return [self._sender.ask(entry, len(job.block_ids), **kind)]

    def _left(self, entry: DepartingJob, how: HandoffEnd, now: float) -> Commands:
        job = entry.job
        job.leaving = None
        if entry.target == job.bypass_to and how is not HandoffEnd.UNKNOWN:
            job.bypass_to, job.is_taken = None, how is HandoffEnd.TAKEN
            return self._leave(job)
        is_optional = job.is_taken  # a decode worker has it, and the pool was to get a copy
        if how is HandoffEnd.FAILED:
            job.num_failed_copies += not entry.is_target_lost
            if job.num_failed_copies < _MOST_COPIES and not (is_optional and entry.is_target_lost):
                return self._leave(job) if job.num_failed_copies <= 1 else ()
        match how:
            case HandoffEnd.REFUSED if not is_optional:
                reason = "the KV pool is too small for it"
                reports = self._router.failed(job, FailureKind.UNSERVABLE, reason)
            case HandoffEnd.FAILED | HandoffEnd.UNKNOWN if not is_optional:
                reports = self._router.send(job.preempted(is_refused=how is HandoffEnd.FAILED))
            case _:
                reports = []
        return [*reports, *self._forget(job)]

    # --- copies of earlier attempts

    def _copy_granted(self, message: CopyGranted, now: float) -> Commands:
        handoff = message.handoff
        job = self._jobs.get(handoff.request.request_id)
        if job is None or job.attempt != message.attempt or job.stage is not CacheStage.ASKING:
            return self._release(handoff.lease_id)
        # A copy of more blocks than the job has would not fit into them.
        does_fit = self._blocks.blocks_for(handoff.copy.context_len) <= len(job.block_ids)
        if not does_fit or not self._num_usable(job, handoff):
            self._enter(job, 0, now)
            return self._release(handoff.lease_id)
        job.go(CacheStage.LOADING)
        job.handoff = handoff
        load = Load(job.request.request_id, handoff.copy, tuple(job.block_ids))
        return [LoadBlocks(self._registered.pool_name, (load,))]

    def _copy_missing(self, message: CopyMissing, now: float) -> Commands:
        job = self._jobs.get(message.request_id)
        if job is not None and job.attempt == message.attempt and job.stage is CacheStage.ASKING:
            self._enter(job, 0, now)
        return []

    def _loaded(self, event: BlocksLoaded, now: float) -> Commands:
        commands: list[WorkerCommand] = []
        for load in event.loads:
            job = self._jobs[load.request_id]
            handoff, job.handoff = job.handoff, None
            assert handoff is not None, "loaded without a copy"
            commands += self._release(handoff.lease_id)
            if job.is_aborted:
                commands += self._end(job)
            else:
                self._enter(job, 0 if load.request_id in event.refused else self._num_usable(job, handoff), now)
        return commands

    def _num_usable(self, job: PrefillJob, handoff: Handoff) -> int:
        return job.num_usable(handoff, takes_whole=self._blocks.has_own_states)

    def _release(self, lease_id: LeaseId) -> Commands:
        return [Send(self._pool, LeasesReleased((lease_id,)))] if self._pool is not None else ()

    # --- iterations

    @override
    def _start_iteration(self, now: float) -> Commands:
        is_urgent = self._is_computing
        if is_urgent and not (self._urgent_cycle.may_begin and self._scheduler.may_yield):
            return []
        requests = self._admit(now)
        if is_urgent:
            slices = self._choose_urgent(now)
        else:
            self._urgent_cycle.pass_began()  # the policy has seen all that came before
            slices = self._scheduler.choose(now)
        if not slices:
            return requests
        additions, self._additions = tuple(self._additions.values()), {}
        removals, self._removals = tuple(self._removals), []
        self._begin_iteration(now, [self._jobs[request_id] for request_id, _ in slices], has_changed=True)
        self._in_flight.append(slices)
        copies, replacements = self._blocks.begin_copies(), self._blocks.take_replacements()
        states = self._blocks.begin_states(self._jobs, slices)
        run = RunIteration(removals, additions, (), slices, None, replacements, copies, is_urgent, states)
        return [run, *requests]

    def _choose_urgent(self, now: float) -> Slices:
        came = [self._jobs[request_id] for request_id in self._urgent_cycle.ask() if request_id in self._jobs]
        ready = [job.request.request_id for job in came if job.stage is CacheStage.HERE and not job.is_aborted]
        slices = self._scheduler.choose_urgent(ready, now)
        if slices:
            self._urgent_cycle.began()
        return slices

    def _came(self, job: PrefillJob) -> None:
        if job.is_real_time:
            self._urgent_cycle.came(job.request.request_id)

    def _admit(self, now: float) -> Commands:
        requests: list[WorkerCommand] = []
        num_holding = sum(bool(job.block_ids) for job in self._jobs.values())
        for job in self._order.of(self._jobs.values(), now):
            # Real-time jobs keep their share beside best effort, where they go first.
            is_bound = self._order.knows_classes and not job.is_real_time
            leaves_room = not is_bound or self._blocks.leave_room(job, self._jobs.values(), self._max_running_requests)
            is_full = num_holding >= self._max_running_requests or not leaves_room
            if is_full or not self._blocks.allocate(job):
                if job is self._order.by_floor:
                    continue
                break
            self._order.note(job, now)
            num_holding += 1
            if job.has_copy and self._pool is not None:
                job.go(CacheStage.ASKING)
                requests.append(Send(self._pool, FetchCopy(job.request.request_id, job.attempt)))
            else:
                self._enter(job, job.num_hit_tokens, now)
        return requests

    def _enter(self, job: PrefillJob, num_cached: int, now: float) -> None:
        job.go(CacheStage.HERE)
        job.num_passed = num_cached
        self._came(job)
        generated, predicted = len(job.generated_token_ids), job.predicted_output_len
        self._scheduler.enter(
            *(job.request, now),
            num_cached=num_cached,
            num_generated=generated,
            predicted_len=predicted,
            begun_s=job.begun_s(now),
        )
        if job.is_retry:
            self._num_reused_tokens += num_cached
            self._num_recomputed_tokens += job.context_len - num_cached
        addition = Addition(job.request, tuple(job.generated_token_ids), tuple(job.block_ids), num_cached)
        self._additions[job.request.request_id] = addition

    @override
    def _completed(self, event: IterationCompleted, now: float) -> Commands:
        duration_s = self._end_iteration(event, now)
        self._scheduler.completed(now, duration_s, event.grammar_s, is_urgent=event.is_urgent, turn_s=event.turn_s)
        members = [job for request_id, _ in self._in_flight.pop() if (job := self._jobs.get(request_id)) is not None]
        self._blocks.passed(members, event.failed)
        if not event.is_urgent:
            self._blocks.copied()
        for token in event.sampled:
            job = self._jobs[token.request_id]
            self._blocks.store(job)
            if not job.generated_token_ids:
                job.first_token_s = now
        changed = self._blocks.changes()
        reports = self._router.send(changed) if changed is not None else ()
        return [*reports, *self._outcome(event)]

    @override
    def _pass_ended(self, event: IterationCompleted, now: float) -> Commands:
        ended = [job for job in self._jobs.values() if job.is_aborted and not job.is_copying]
        return [command for job in ended for command in self._end(job)]

    @override
    def _depart(self, request: PrefillJob) -> Commands:
        self._removals.append(request.request.request_id)
        request.go(CacheStage.LEAVING)
        self._scheduler.leave(request.request.request_id)
        return self._leave(request)

    @override
    def _end(self, request: PrefillJob) -> Commands:
        request_id = request.request.request_id
        released = self._release(request.handoff.lease_id) if request.handoff is not None else ()
        was_added = self._additions.pop(request_id, None) is None and request.stage is CacheStage.HERE
        if was_added and request_id not in self._removals:
            self._removals.append(request_id)
        return [*released, *self._forget(request)]

    def _forget(self, job: PrefillJob) -> Commands:
        self._scheduler.leave(job.request.request_id)
        self._blocks.free(job)
        del self._jobs[job.request.request_id]
        return self._accept(job.successor, job.successor_s) if job.successor is not None else ()

    # --- beside them

    @override
    def waiting(self) -> list[WaitingRequest]:
        jobs = self._jobs.values()
        is_full = sum(bool(job.block_ids) for job in jobs) >= self._max_running_requests
        causes = [(job, waiting_cause(job, is_full=is_full)) for job in jobs]
        return [WaitingRequest(job.request.request_id, cause) for job, cause in causes if cause is not None]

    @override
    def _load(self, *, is_due: bool) -> WorkerLoad | None:
        if not is_due:
            return None
        num_waiting = sum(not job.block_ids for job in self._jobs.values())
        return WorkerLoad(
            num_waiting=num_waiting,
            num_running=len(self._jobs) - num_waiting,
            num_free_blocks=self._blocks.num_free,
            num_reused_tokens=self._num_reused_tokens,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_prefix_query_tokens=self._blocks.num_query_tokens,
            num_prefix_hit_tokens=self._blocks.num_hit_tokens,
        )


def _contents_of(entry: DepartingJob, now: float) -> Contents:
    job, generated = entry.job, tuple(entry.job.generated_token_ids)
    return Contents(job.num_cached, generated, job.predicted_output_len, job.begun_s(now), service_s=0.0)


def buffer_blocks_of(config: PrefillWorkerConfig, layout: BlockLayout, num_decode_workers: int) -> int:
    return layout.blocks_in(config.candidate_buffer_bytes) // num_decode_workers


def make_logic(
    *,
    registered: WorkerRegistered,
    config: PrefillWorkerConfig,
    scheduling: SchedulingConfig,
    eos_token_ids: frozenset[int],
    costs: CostModel | None = None,
    measured: tuple[Sample, ...] = (),
    prefix_cache: PrefixCacheConfig | None = None,
    num_layers: int | None = None,
    state_blocks: int = 0,
) -> PrefillLogic:
    """Build the logic of one prefill worker. Without `costs` it learns them, beginning with `measured` iterations.

    `prefix_cache`: None: none. `num_layers`: of the model, between which a pass may stop. `state_blocks`: of every
    request, before those of its tokens. Raises ConfigError naming what is unknown.
    """
    max_context_len = registered.num_blocks * registered.block_size
    speed = measured_speed(limits_of(config), costs, measured, max_context_len=max_context_len)
    scheduler = make_iteration_scheduler(scheduling, limits_of(config), costs, measured, num_layers)
    with_order = msgspec.structs.replace(registered, is_fcfs=not scheduler.prioritizes_real_time)
    return PrefillLogic(
        registered=with_speed(with_order, speed),
        max_running_requests=config.max_running_requests,
        scheduler=scheduler,
        eos_token_ids=eos_token_ids,
        prefixes=_prefixes(registered, prefix_cache, state_blocks),
        state_blocks=state_blocks,
    )


def _prefixes(registered: WorkerRegistered, config: PrefixCacheConfig | None, state_blocks: int) -> PrefixCache | None:
    if config is None or not config.enabled:
        return None
    return PrefixCache(registered.block_size, states=budget_of(config, registered.num_blocks, state_blocks))
