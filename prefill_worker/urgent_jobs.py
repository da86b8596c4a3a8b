"""Real-time jobs that may be computed while an iteration is in flight, within it (scheduling/yielding.py)."""

from collections.abc import Mapping

from alignedserve.core.ids import RequestId
from alignedserve.messages.iterations import IterationCompleted
from alignedserve.scheduling.iteration_scheduler import IterationScheduler, Slices
from prefill_worker.state import JobStage, PrefillJob


class UrgentJobs:
    """The jobs that have come during the pass in flight, and the urgent iteration: one at a time."""

    def __init__(self, scheduler: IterationScheduler) -> None:
        self._scheduler = scheduler
        self._came: dict[RequestId, None] = {}  # and have no token yet
        self._kept: IterationCompleted | None = None
        self._is_running = False
        self._has_news = False  # since they were last looked at

    @property
    def may_begin(self) -> bool:
        """True if something has changed since it was last asked whether an urgent iteration is to begin."""
        return self._has_news and not self._is_running and self._scheduler.may_yield

    def came(self, job: PrefillJob) -> None:
        """Note a job that has come, or can be computed now."""
        if job.is_real_time:
            self._came[job.request.request_id] = None
            self._has_news = True

    def choose(self, now: float) -> Slices:
        """Choose the slices of the next iteration, by a policy that has seen all that came before."""
        self._came.clear()
        self._has_news = False
        return self._scheduler.choose(now)

    def choose_urgent(self, jobs: Mapping[RequestId, PrefillJob], now: float) -> Slices:
        """Choose the slices of an urgent iteration, which begins then; none: it does not pay. `jobs`: all."""
        self._has_news = False
        came = [jobs[request_id] for request_id in self._came if request_id in jobs]
        ready = [job.request.request_id for job in came if job.stage is JobStage.COMPUTING and not job.is_aborted]
        slices = self._scheduler.choose_urgent(ready, now)
        self._is_running = bool(slices)
        return slices

    def keeps(self, event: IterationCompleted) -> bool:
        """Keep the end of the pass until that of the urgent iteration; return whether it did."""
        if event.is_urgent or not self._is_running:
            return False
        self._kept = event
        return True

    def end(self) -> IterationCompleted | None:
        """Note the end of the urgent iteration, which has been dealt with; return that of the pass, if it was kept."""
        self._is_running, self._has_news = False, bool(self._came)
        kept, self._kept = self._kept, None
        return kept
