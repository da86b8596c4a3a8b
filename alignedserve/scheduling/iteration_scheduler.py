"""Schedulers of iterations on prefill workers, where each prompt holds its blocks and none is evicted."""

from collections.abc import Sequence
from dataclasses import replace

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import plan_chunks
from alignedserve.core.request import Request
from alignedserve.scheduling.policy import DeviceMemory, IterationPlan, WorkerView
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.scheduling.scheduler_state import SchedulerState
from alignedserve.scheduling.yielding import UrgentPlans, Yielding

# The worker manages its blocks itself: the policy sees a memory of one block per request, all of them held and none
# free, so that memory is nothing to choose by.
_BLOCK_TOKENS = 1 << 40

Slices = tuple[tuple[RequestId, int], ...]


class FcfsIterationScheduler:
    """First come, first served: each request computes as many tokens as the iteration has left."""

    prioritizes_real_time = False  # when blocks are allocated
    best_effort_floor = 0.0  # of best effort then
    may_yield = False  # urgent iterations may begin within one in flight

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._remaining: dict[RequestId, int] = {}

    def enter(
        self,
        request: Request,
        now: float,
        *,
        num_cached: int,
        num_generated: int,
        predicted_len: float | None,
        begun_s: float = 0.0,
    ) -> None:
        self._remaining[request.request_id] = request.prompt_len + num_generated - num_cached

    def leave(self, request_id: RequestId) -> None:
        self._remaining.pop(request_id, None)

    def set_predicted_length(self, request_id: RequestId, predicted_len: float) -> None:
        """The order does not depend on it."""

    def choose(self, now: float) -> Slices:
        slices = plan_chunks(self._remaining.items(), self._max_tokens)
        for request_id, num_tokens in slices:
            self._remaining[request_id] -= num_tokens
        return slices

    def choose_urgent(self, request_ids: Sequence[RequestId], now: float) -> Slices:
        return ()

    def completed(
        self,
        now: float,
        duration_s: float,
        grammar_s: float | None = None,
        *,
        is_urgent: bool = False,
        turn_s: float = 0.0,
    ) -> None: ...


class PolicyIterationScheduler:
    """Scheduling by an iteration policy. Tracks every request that enters, leaves and computes."""

    prioritizes_real_time = True

    def __init__(
        self, scheduler: Scheduler, yielding: Yielding | None = None, *, best_effort_floor: float = 0.0
    ) -> None:
        """`yielding`: whether a pass stops between two layers; None: never. `best_effort_floor`: share of the tokens of
        jobs to which blocks are allocated."""
        self._scheduler = scheduler
        self.best_effort_floor = best_effort_floor
        self._state = SchedulerState(DeviceMemory(num_blocks=0, num_free=0, block_size=_BLOCK_TOKENS))
        self._urgent = None if yielding is None else UrgentPlans(self._state, scheduler, yielding)

    @property
    def may_yield(self) -> bool:
        return self._urgent is not None

    def enter(
        self,
        request: Request,
        now: float,
        *,
        num_cached: int,
        num_generated: int,
        predicted_len: float | None,
        begun_s: float = 0.0,
    ) -> None:
        """Add a request that has the cache of `num_cached` tokens and can compute from now on.

        `begun_s`: since the first of its generated tokens.
        """
        self._state.add(request, now, predicted_len=predicted_len, num_generated=num_generated, begun_s=begun_s)
        row = self._state.table.row(request.request_id)
        self._state.table.num_cached[row] = num_cached
        self._state.table.num_blocks[row] = 1

    def leave(self, request_id: RequestId) -> None:
        """Remove a request that is in no iteration in flight. It may be gone already."""
        if request_id in self._state.table:
            num_blocks = self._state.remove_beside(request_id)
            self._state.num_free -= num_blocks  # they go with it

    def set_predicted_length(self, request_id: RequestId, predicted_len: float) -> None:
        """Set a prediction that came late; requests that are not here are ignored."""
        if request_id in self._state.table:
            self._state.set_predicted_length(request_id, predicted_len)

    def choose(self, now: float) -> Slices:
        plan = self._scheduler.policy.plan(self._view(now))
        assert not plan.evictions, "evictions on a worker that cannot evict"
        self._state.begin(plan)
        if self._urgent is not None:
            self._urgent.pass_began(now)
        return self._slices_of(plan)

    def choose_urgent(self, request_ids: Sequence[RequestId], now: float) -> Slices:
        """Choose how many tokens each of these computes within the iteration in flight; none: they wait for its end."""
        if self._urgent is None or not request_ids or not self._urgent.may_begin:
            return ()
        plan = self._urgent.begin(self._view(now), [self._state.table.row(request_id) for request_id in request_ids])
        return () if plan is None else self._slices_of(plan)

    def completed(
        self,
        now: float,
        duration_s: float,
        grammar_s: float | None = None,
        *,
        is_urgent: bool = False,
        turn_s: float = 0.0,
    ) -> None:
        """Note the end of the iteration, before any request leaves because of it. An urgent one ends first.

        `turn_s`: of an encoder before it.
        """
        if not is_urgent:
            self._scheduler.turns.note(turn_s)
        self._scheduler.completed(self._state, now=now, duration_s=duration_s, grammar_s=grammar_s, is_urgent=is_urgent)
        if is_urgent and self._urgent is not None:
            self._urgent.end(duration_s)

    def _view(self, now: float) -> WorkerView:
        view = self._scheduler.view(self._state, now)
        return replace(view, memory=replace(view.memory, num_blocks=len(view.table)), can_evict=False)

    def _slices_of(self, plan: IterationPlan) -> Slices:
        request_ids = self._state.table.request_ids
        return tuple((request_ids[part.row], part.num_tokens) for part in plan.scheduled)


IterationScheduler = FcfsIterationScheduler | PolicyIterationScheduler
