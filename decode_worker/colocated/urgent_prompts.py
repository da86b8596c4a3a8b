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

from alignedserve.core.request import Request
from alignedserve.messages.iterations import IterationCompleted, RunIteration
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.scheduling.yielding import UrgentPlans, Yielding
from alignedserve.worker_core.urgent_cycle import UrgentCycle
from decode_worker.held_requests import HeldRequest, HeldRequests
from decode_worker.plan_performer import PlanPerformer


class UrgentPrompts:
    """Begins and ends urgent iterations of the prompts that have come."""

    def __init__(self, held: HeldRequests, scheduler: Scheduler, performer: PlanPerformer, yielding: Yielding) -> None:
        self._held = held
        self._scheduler = scheduler
        self._performer = performer
        self._plans = UrgentPlans(held.state, scheduler, yielding)
        self._began_s = 0.0
        self.cycle = UrgentCycle()
        self.members: tuple[HeldRequest, ...] = ()  # of the urgent iteration in flight

    def came(self, request: Request) -> None:
        if request.is_real_time:
            self.cycle.came(request.request_id)

    def pass_began(self, now: float) -> None:
        """Note the iteration that has begun; the policy has seen all that came before."""
        self.cycle.pass_began()
        self._plans.pass_began(now)

    def begin(self, now: float) -> RunIteration | None:
        """Begin an iteration of what has come, within the one in flight; None: it waits for the end of that."""
        if not self.cycle.may_begin:
            return None
        rows = self._waiting_rows()
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

    def end(self, event: IterationCompleted, now: float) -> IterationCompleted | None:
        """Note the end of the urgent iteration, which has been dealt with; return that of the pass, if it was kept."""
        self._plans.end(event.duration_s(self._began_s, now))
        self.members = ()
        return self.cycle.end()

    def _waiting_rows(self) -> list[int]:
        waiting = [one for one in map(self._held.get, self.cycle.ask()) if one is not None]
        kept = [one for one in waiting if not (one.is_prefilled or one.is_aborted or one.is_finished)]
        self.cycle.keep(one.request.request_id for one in kept)
        return [self._held.state.table.row(one.request.request_id) for one in kept]
