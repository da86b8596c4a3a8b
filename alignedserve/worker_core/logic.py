"""Decisions of a colocated worker: prompts and decodes on one device, iteration by iteration, by its policy.

The life of a request on a colocated worker:
1. PrefillRequest: it waits here, in the policy's table. The router keeps no queue of its own for such workers.
2. Before every iteration the policy chooses which requests compute how many tokens, and whose cache leaves the device:
   dropped, to be computed again, or swapped to host memory. Requests not in the iteration pause and keep their blocks.
   What a request begins with may be cached from others before it: then it computes only the rest.
3. A request that has computed its whole context samples a token, which goes straight to its gateway. With the first
   one PrefillCompleted tells the router that its prompt is done.
4. Its stop token or limit ends it: RequestFinished, and its blocks are freed or stay cached. Or its client leaves:
   AbortRequest.
Requests are never sent back to the router: a preempted one waits here and resumes with the tokens it has generated.
Under the elastic topology the router may move one that decodes to another worker: moves.py. Where the pool of the node
keeps decodes, the policy may let one wait there: pooled_decodes.py.
"""

from collections.abc import Collection

import msgspec
from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from alignedserve.messages.iterations import IterationCompleted, MapArena, RunIteration, UnmapArena
from alignedserve.messages.request_notes import Cause
from alignedserve.messages.workers import DecodeDelay, PrefillRequest, SetPredictedLength, WorkerLoad, WorkerRegistered
from alignedserve.prefix_cache.contexts import PrefixCache
from alignedserve.scheduling.drafting import DraftLimits
from alignedserve.scheduling.policy import DeviceMemory, IterationPlan
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.scheduling.yielding import UrgentPlans, Yielding
from alignedserve.worker_core.block_peers import BlockPeers
from alignedserve.worker_core.held_requests import HeldRequest, HeldRequests
from alignedserve.worker_core.moves import RequestMoves
from alignedserve.worker_core.part import Commands, WorkerCommand, WorkerEvent
from alignedserve.worker_core.plan_performer import PlanPerformer
from alignedserve.worker_core.pooled_decodes import PooledDecodes, is_of_link
from alignedserve.worker_core.pooled_prefixes import PooledPrefixes
from alignedserve.worker_core.request import with_prediction
from alignedserve.worker_core.request_notes import Phases, WaitingRequest
from alignedserve.worker_core.worker_logic import UrgentCycle, WorkerLogic


class UrgentPrompts:
    """Real-time prompts that come while an iteration is in flight, and the urgent iteration within it.

    The rule (scheduling/yielding.py) forecasts whether stopping a pass of mostly best-effort work pays. The urgent
    iteration uses free blocks alone and evicts nobody; the engine stops the pass between two layers for it. Later
    prompts may begin another. If the pass ends first, its end is dealt with after the urgent one's.
    """

    def __init__(
        self,
        held: HeldRequests,
        scheduler: Scheduler,
        performer: PlanPerformer,
        yielding: Yielding,
        cycle: UrgentCycle,
    ) -> None:
        self._held = held
        self._scheduler = scheduler
        self._performer = performer
        self._plans = UrgentPlans(held.state, scheduler, yielding)
        self._began_s = 0.0
        self.cycle = cycle
        self.members: tuple[HeldRequest, ...] = ()  # of the urgent iteration in flight

    def came(self, request: Request) -> None:
        if request.is_real_time:
            self.cycle.came(request.request_id)

    def pass_began(self, now: float) -> None:
        self.cycle.pass_began()
        self._plans.pass_began(now)

    def begin(self, now: float) -> RunIteration | None:
        if not self.cycle.may_begin or not self._plans.may_begin:
            return None
        came = [held for held in map(self._held.get, self.cycle.ask()) if held is not None]
        waiting = [held for held in came if not (held.is_prefilled or held.is_aborted or held.is_finished)]
        self.cycle.keep(held.request.request_id for held in waiting)
        rows = [self._held.state.table.row(held.request.request_id) for held in waiting]
        if not rows:
            return None
        self._held.foresee_hits()
        view = self._held.state.view(limits=self._scheduler.limits, costs=self._scheduler.costs, now=now)
        plan = self._plans.begin(view, rows)
        if plan is None:
            return None
        self.cycle.began()
        self.members, self._began_s = self._held.of_parts(plan.scheduled), now
        return msgspec.structs.replace(self._performer.perform(plan, self.members, now), is_urgent=True)

    def end(self, event: IterationCompleted, now: float) -> None:
        self._plans.end(event.duration_s(self._began_s, now))
        self.members = ()


def causes_of(held: HeldRequests, members: Collection[HeldRequest], max_running: int) -> list[WaitingRequest]:
    computing = {member.request.request_id for member in members}
    num_running = len(computing)
    waiting = [waiter for waiter in held if waiter.request.request_id not in computing and not waiter.is_finished]
    is_full = num_running >= max_running
    return [
        WaitingRequest(waiter.request.request_id, _cause_of(waiter, held, is_full), num_running) for waiter in waiting
    ]


def _cause_of(tracked: HeldRequest, held: HeldRequests, is_full: bool) -> Cause:
    if is_full:
        return Cause.BATCH_FULL
    num_missing = held.blocks_for(tracked.context_len) - len(tracked.block_ids)
    return Cause.BLOCKS_SHORT if held.state.num_free < num_missing else Cause.OTHERS_FIRST


_LEAN_STEPS = 32


class ColocatedLogic(WorkerLogic[HeldRequest]):
    """All requests of the worker, its blocks, and the one iteration that is in flight at a time."""

    phases = Phases.BOTH

    def __init__(
        self,
        *,
        registered: WorkerRegistered,
        memory: DeviceMemory,
        scheduler: Scheduler,
        eos_token_ids: frozenset[int],
        prefixes: PrefixCache | None = None,
        prefix_pool: str | None = None,
        decode_pool: str | None = None,
        yielding: Yielding | None = None,
        drafting: DraftLimits | None = None,
    ) -> None:
        """`memory`: empty. `prefixes`: the empty prefix cache in it; None: none. `yielding`: whether a pass stops;
        None: never. `drafting`: None: no tokens are drafted.
        `prefix_pool`: the pool of its node, if it keeps prefix blocks; `decode_pool`: the same, if it keeps decodes.
        """
        assert memory.num_blocks == memory.num_free == registered.num_blocks, "memory that is not the worker's"
        super().__init__(registered, eos_token_ids)
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._requests = HeldRequests(memory, prefixes)
        self._state = self._requests.state
        self._by_id = self._requests.by_id
        self._members: tuple[HeldRequest, ...] = ()  # of the latest iteration
        self._are_prefilled = False  # all of them: then they stay so
        self._postponed: dict[RequestId, PrefillRequest] = {}  # until blocks that are held for moves are free again
        self._performer = PlanPerformer(self._requests)
        self._drafting = drafting
        self._lean, self._prompt_rate, self._delay = 1.0, 0, DecodeDelay()
        self._pooled = self._decodes = self._moves = self._urgent = None
        if decode_pool is not None:
            self._decodes = PooledDecodes(self._requests, decode_pool, swap_s=scheduler.costs.swap_s)
            self._parts += (self._decodes,)
        if prefixes is not None and prefix_pool is not None:
            self._pooled = PooledPrefixes(
                self._requests, prefixes, prefix_pool, tokens_per_s=self._tokens_per_s, admit=self._accept
            )
            self._parts += (self._pooled,)
        if registered.can_move:
            peers = BlockPeers(registered.pool_name)
            self._moves = RequestMoves(self._requests, self._router, registered, peers)
            self._parts += (peers, self._moves)
        if yielding is not None:
            self._urgent = UrgentPrompts(self._requests, scheduler, self._performer, yielding, self._urgent_cycle)

    @override
    def _handle(self, event: WorkerEvent, now: float) -> Commands:
        commands = super()._handle(event, now)
        if self._pooled is None:
            return commands
        if self._decodes is not None and is_of_link(event) and self._decodes.takes(event):
            # The link to the pool is of both parts, and its arena is mapped once.
            others = self._pooled.on_event(event, now)
            commands = [*commands, *(sent for sent in others if not isinstance(sent, MapArena | UnmapArena))]
        return [*commands, *self._pooled.offer(now)]

    @override
    def _tick(self, now: float) -> Commands:
        if self._moves is not None:
            self._measure_lean()
        ticked = [command for part in self._parts for command in part.tick(now)]
        return [*ticked, *self._router.totals(self.iteration_log, now, self._scheduler.shown), *self._tell_blocks()]

    @override
    def _router_connected(self, peer: str, now: float) -> Commands:
        commands: list[WorkerCommand] = []
        for part in reversed(self._parts):
            commands += part.abort_all(now)
            if part is self._moves:
                self._measure_lean()
        for tracked in list(self._requests):
            if not tracked.can_outlast_router:
                commands += self._abort(tracked.request.request_id)
        self._postponed.clear()
        decoding = [tracked for tracked in self._requests if tracked.can_outlast_router]
        return [*commands, *self._router.connected(peer, decoding), *self._tell_blocks(is_new=True)]

    # --- a request comes, and is given up

    @override
    def _never_fits(self, message: PrefillRequest) -> bool:
        return self._requests.blocks_for(message.request.max_context_len) > self._registered.num_blocks

    @override
    def _add(self, message: PrefillRequest, now: float, *, is_new: bool) -> Commands:
        asked, does_wait = self._pooled.ask(message, now) if self._pooled is not None and is_new else ((), False)
        if not does_wait:
            self._admit(message, now)
        return asked

    def _admit(self, message: PrefillRequest, now: float) -> None:
        request = message.request
        context_len = request.prompt_len + len(message.generated_token_ids)
        if self._requests.has_room_for(request, context_len):
            self._requests.add(message, now)
            if self._urgent is not None:
                self._urgent.came(request)
        else:
            self._postponed[request.request_id] = message

    def _admit_postponed(self, now: float) -> Commands:
        # Each as if it came now: an earlier attempt at it may have come from another worker meanwhile.
        postponed, self._postponed = self._postponed, {}
        return [sent for message in postponed.values() for sent in self._accept(message, now, is_new=False)]

    @override
    def _set_predicted_length(self, message: SetPredictedLength) -> None:
        tracked = self._requests.get(message.request_id)
        if tracked is not None and tracked.set_predicted_length(message):
            self._state.set_predicted_length(message.request_id, message.predicted_output_len)
        if self._pooled is not None:
            self._pooled.set_predicted_length(message)
        postponed = self._postponed.get(message.request_id)
        if postponed is not None:
            self._postponed[message.request_id] = with_prediction(postponed, message)

    @override
    def _abort(self, request_id: RequestId, attempt: int | None = None) -> Commands:
        tracked = self._requests.get(request_id)
        if tracked is not None and tracked.abort(attempt) and not self._is_computing:
            self._requests.drop(tracked)
        postponed = self._postponed.get(request_id)
        if postponed is not None and (attempt is None or postponed.attempt <= attempt):
            del self._postponed[request_id]
        return [command for part in reversed(self._parts) for command in part.abort(request_id, attempt)]

    # --- iterations

    @override
    def _start_iteration(self, now: float) -> Commands:
        if self._is_computing:
            return self._start_urgent(now)
        commands = [command for part in reversed(self._parts) for command in part.leave(now)]
        if self._postponed:
            commands += self._admit_postponed(now)
        if not self._requests or not self._requests.can_compute:
            return commands
        self._requests.foresee_hits()
        if self._decodes is not None:
            self._state.pool = self._decodes.view(now)
        plan = self._scheduler.plan(self._state, now)
        exchanged = [self._requests.of_row(row) for row in (*plan.departures, *plan.returns)]
        iteration = self._begin(plan, now) if plan.scheduled else []
        assert iteration or not plan.evictions, "evictions without a scheduled request"
        if self._decodes is not None:
            commands += self._decodes.exchange(exchanged)
            if plan.departures and not iteration and not self._decodes.has_copies:  # what was to leave cannot
                self._decodes.rest(now)
                commands += self._start_iteration(now)
        return [*iteration, *commands]

    def _begin(self, plan: IterationPlan, now: float) -> list[RunIteration]:
        members = self._requests.of_parts(plan.scheduled)
        self._state.begin(plan)
        drafts = () if self._drafting is None else self._scheduler.drafts(self._drafting, self._state, plan)
        iteration = self._performer.perform(plan, members, now)
        if drafts:
            iteration = msgspec.structs.replace(iteration, drafts=drafts)
        has_changed = members != self._members
        if has_changed or not self._are_prefilled:
            self._are_prefilled = all(tracked.is_prefilled for tracked in members)
        self._begin_iteration(now, members, has_changed=has_changed, alone_s=plan.alone_s)
        self._members = members
        if self._urgent is not None:
            self._urgent.pass_began(now)
        return [iteration]

    def _start_urgent(self, now: float) -> Commands:
        if self._urgent is None or (iteration := self._urgent.begin(now)) is None:
            return ()
        self._begin_iteration(now, self._urgent.members, has_changed=True)
        return [iteration]

    @override
    def _completed(self, event: IterationCompleted, now: float) -> Commands:
        self._performer.completed()
        right = dict(event.forced)
        for request_id, num_drafted, _ in event.drafted:
            self._state.note_forced(request_id, right.pop(request_id, 0), num_drafted=num_drafted)
        for request_id, num_tokens in right.items():
            self._state.note_forced(request_id, num_tokens)
        if self._drafting is not None:
            self._drafting.note(event.drafted)
        for request_id in event.skipped:
            self._state.note_skipped(request_id)
        duration_s = self._end_iteration(event, now)
        self._scheduler.turns.note(event.turn_s)
        self._scheduler.completed(
            self._state, now=now, duration_s=duration_s, grammar_s=event.grammar_s, is_urgent=event.is_urgent
        )
        may_be_new = event.is_urgent or not self._are_prefilled
        has_prompts = may_be_new and any(not self._by_id[token.request_id].is_prefilled for token in event.sampled)
        outcome = self._outcome(event)
        # The tokens of the filled blocks are known by now, but of those that nobody waits for any more.
        self._requests.store_filled({*event.failed, *self._aborted_jumps(event)})
        if event.is_urgent and self._urgent is not None:
            self._urgent.end(event, now)
        # The router hears of blocks before the end of their prompt, when it ceases to expect them. Blocks that decodes
        # fill are told with the next tick: thousands of workers tell a router at most so often.
        return [*(self._tell_blocks() if has_prompts else ()), *outcome]

    def _aborted_jumps(self, event: IterationCompleted) -> list[RequestId]:
        return [request_id for request_id, _ in event.forced if self._requests[request_id].is_aborted]

    @override
    def _pass_ended(self, event: IterationCompleted, now: float) -> Commands:
        for tracked in [tracked for tracked in self._requests if tracked.is_aborted or tracked.is_finished]:
            self._requests.drop(tracked)
            if tracked.successor is not None:
                self._admit(tracked.successor, now)
        return ()

    @override
    def _end(self, request: HeldRequest) -> Commands:
        request.is_finished = True
        return ()

    # --- beside them

    @override
    def waiting(self) -> list[WaitingRequest]:
        held_back = [WaitingRequest(request_id, Cause.BLOCKS_HELD) for request_id in self._postponed]
        if self._pooled is not None:
            held_back += [WaitingRequest(request_id, Cause.PREFIX) for request_id in self._pooled.waiting()]
        max_running = self._registered.num_places or self._registered.max_running_requests
        return held_back + causes_of(self._requests, self._computing, max_running)

    @property
    def _computing(self) -> tuple[HeldRequest, ...]:
        return self._members if self._urgent is None else self._members + self._urgent.members

    @override
    def _load(self, *, is_due: bool) -> WorkerLoad:
        num_running = len(self._computing) if self._is_computing else 0
        num_held_back = len(self._postponed) + (len(self._pooled) if self._pooled is not None else 0)
        prefixes = self._prefixes
        return WorkerLoad(
            num_waiting=len(self._requests) + num_held_back - num_running,
            num_running=num_running,
            num_free_blocks=self._state.num_free,
            num_handoffs_verified=self._moves.num_taken if self._moves is not None else 0,
            num_evictions=self._performer.num_preemptions
            + (self._decodes.num_left if self._decodes is not None else 0),
            num_recomputed_tokens=self._state.num_recomputed,
            lean=self._lean,
            prompt_tokens_per_s=self._prompt_rate,
            num_prefix_query_tokens=prefixes.num_query_tokens if prefixes is not None else 0,
            num_prefix_hit_tokens=prefixes.num_hit_tokens if prefixes is not None else 0,
            num_prefix_blocks=len(prefixes.blocks) if prefixes is not None else 0,
            num_prefix_evictions=prefixes.blocks.num_evicted if prefixes is not None else 0,
            delay=self._delay,
        )

    def _tell_blocks(self, *, is_new: bool = False) -> Commands:
        if self._prefixes is None or not self._router.is_connected:
            return ()
        cached = self._prefixes.blocks
        changed = cached.told_all() if is_new else cached.told_changes()
        return () if changed is None else self._router.send(changed)

    def _tokens_per_s(self) -> float:
        return self._scheduler.prompt_capacity(self._state).tokens_per_s

    def _measure_lean(self) -> None:
        capacity = self._scheduler.prompt_capacity(self._state)
        self._lean = round(capacity.share * _LEAN_STEPS) / _LEAN_STEPS
        self._prompt_rate = int(capacity.tokens_per_s)
        self._delay = self._scheduler.decode_delay(self._state)
