"""Real-time jobs that may be computed while an iteration is in flight, within it (scheduling/yielding.py)."""

from collections.abc import Mapping

from alignedserve.core.ids import RequestId
from alignedserve.scheduling.iteration_scheduler import IterationScheduler, Slices
from alignedserve.worker_core.urgent_cycle import UrgentCycle
from prefill_worker.state import JobStage, PrefillJob


class UrgentJobs:
    """Chooses what the next iteration computes, and an urgent one within it."""

    def __init__(self, scheduler: IterationScheduler) -> None:
        self._scheduler = scheduler
        self.cycle = UrgentCycle()

    @property
    def may_begin(self) -> bool:
        """True if something has changed since it was last asked whether an urgent iteration is to begin."""
        return self.cycle.may_begin and self._scheduler.may_yield

    def came(self, job: PrefillJob) -> None:
        if job.is_real_time:
            self.cycle.came(job.request.request_id)

    def choose(self, now: float) -> Slices:
        """Choose the slices of the next iteration, by a policy that has seen all that came before."""
        self.cycle.pass_began()
        return self._scheduler.choose(now)

    def choose_urgent(self, jobs: Mapping[RequestId, PrefillJob], now: float) -> Slices:
        """Choose the slices of an urgent iteration, which begins then; none: it does not pay. `jobs`: all."""
        came = [jobs[request_id] for request_id in self.cycle.ask() if request_id in jobs]
        ready = [job.request.request_id for job in came if job.stage is JobStage.COMPUTING and not job.is_aborted]
        slices = self._scheduler.choose_urgent(ready, now)
        if slices:
            self.cycle.began()
        return slices
