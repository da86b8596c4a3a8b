"""The iteration in flight and an urgent one within it, as the rule and the scheduler's state know them."""

from collections.abc import Sequence

from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.scheduling.scheduler_state import Flight, SchedulerState
from alignedserve.scheduling.yielding import StoppablePass, Yielding


class UrgentPlans:
    """Plans urgent iterations, one at a time. For workers of any kind."""

    def __init__(self, state: SchedulerState, scheduler: Scheduler, yielding: Yielding) -> None:
        self._state = state
        self._scheduler = scheduler
        self._yielding = yielding
        self._pass = StoppablePass(0.0, 0.0)
        self._flight: Flight | None = None  # of the pass, while an urgent iteration is in flight

    def pass_began(self, now: float) -> None:
        """Note the iteration that has begun, which the state knows."""
        predicted_s = self._scheduler.costs.iteration_s(self._state.work)
        self._pass = StoppablePass(now, predicted_s)
        self._yielding.pass_began(self._state.table, self._state.set_aside(), predicted_s)

    def begin(self, view: WorkerView, rows: Sequence[int]) -> IterationPlan | None:
        """Begin an iteration of these prompts within the one in flight; None: they wait for the end of that."""
        assert self._flight is None, "two urgent iterations at once"
        flight = self._state.set_aside()
        plan = self._yielding.plan(view, self._pass, flight, rows)
        if plan is not None:
            self._flight = flight
            self._state.begin(plan)
            self._state.history.urgent_began(min(self._state.table.ttft_s[part.row] for part in plan.scheduled))
        return plan

    def end(self, duration_s: float) -> None:
        """Note the end of the urgent iteration, which the state knows; that of the pass follows."""
        assert self._flight is not None, "an urgent iteration ended that was not begun"
        self._state.take_up(self._flight)
        self._flight = None
        self._pass.stopped_s += duration_s
