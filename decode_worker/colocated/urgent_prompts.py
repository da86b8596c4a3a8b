"""Real-time prompts that come while an iteration is in flight, and the iteration that computes them within it.

1. A prompt comes, and the pass in flight is mostly best-effort work. The rule (scheduling/yielding.py) forecasts what
   it would cost and bring to stop there.
2. An urgent iteration of the prompts that have come begins: free blocks alone, nobody is evicted. The engine stops the
   pass between two layers, computes it and goes on with the pass.
3. It ends, and more that has come meanwhile may begin another one; or the pass ends first, where it was nearly done
   when it was to stop. Its end is then dealt with after that of the urgent one.
Until both have ended no request leaves the table: an aborted one is dropped then, and one that moves leaves then.
"""

import msgspec

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass
from alignedserve.messages.iterations import IterationCompleted, RunIteration
from alignedserve.scheduling.scheduler_state import Scheduler
from alignedserve.scheduling.urgent_plans import UrgentPlans
from alignedserve.scheduling.yielding import Yielding
from decode_worker.held_requests import HeldRequest, HeldRequests
from decode_worker.plan_performer import PlanPerformer


class UrgentPrompts:
    """The prompts that have come during the pass in flight, and the urgent iteration: one at a time."""

    def __init__(self, held: HeldRequests, scheduler: Scheduler, performer: PlanPerformer, yielding: Yielding) -> None:
        self._held = held
        self._scheduler = scheduler
        self._performer = performer
        self._plans = UrgentPlans(held.state, scheduler, yielding)
        self._came: dict[RequestId, None] = {}  # and have no token yet
        self._has_news = False  # since the rule was asked
        self._began_s = 0.0
        self._kept: IterationCompleted | None = None
        self.members: tuple[HeldRequest, ...] = ()  # of the urgent iteration in flight

    def came(self, request: Request) -> None:
        """Note a request that has come."""
        if request.request_class is RequestClass.REAL_TIME:
            self._came[request.request_id] = None
            self._has_news = True

    def pass_began(self, now: float) -> None:
        """Note the iteration that has begun; the policy has seen all that came before."""
        self._came.clear()
        self._has_news = False
        self._plans.pass_began(now)

    def begin(self, now: float) -> RunIteration | None:
        """Begin an iteration of what has come, within the one in flight; None: it waits for the end of that."""
        if self._plans.is_running or not self._has_news:
            return None
        self._has_news = False
        rows = self._waiting_rows()
        if not rows:
            return None
        self._held.foresee_hits()
        view = self._held.state.view(limits=self._scheduler.limits, costs=self._scheduler.costs, now=now)
        plan = self._plans.begin(view, rows)
        if plan is None:
            return None
        self.members, self._began_s = self._held.of_parts(plan.scheduled), now
        return msgspec.structs.replace(self._performer.perform(plan, self.members, now), is_urgent=True)

    def keeps(self, event: IterationCompleted) -> bool:
        """Keep the end of the pass until that of the urgent iteration; return whether it did."""
        if event.is_urgent or not self._plans.is_running:
            return False
        self._kept = event
        return True

    def end(self, event: IterationCompleted, now: float) -> IterationCompleted | None:
        """Note the end of the urgent iteration, which has been dealt with; return that of the pass, if it was kept."""
        self._plans.end(event.duration_s(self._began_s, now))
        self.members, self._has_news = (), bool(self._came)
        kept, self._kept = self._kept, None
        return kept

    def _waiting_rows(self) -> list[int]:
        """Return the rows of those that wait, in the order in which they came."""
        waiting = [one for one in map(self._held.get, self._came) if one is not None]
        kept = [one for one in waiting if not (one.is_prefilled or one.is_aborted or one.is_finished)]
        self._came = {one.request.request_id: None for one in kept}
        return [self._held.state.table.row(request_id) for request_id in self._came]
