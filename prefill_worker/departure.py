"""Departure of a computed request from a prefill worker: to the pool, or first to a decode worker if it is urgent.

It is a handoff (worker_core/handoff.py), copied beside the running iteration. A request that a decode worker
took is then offered to the pool as a copy, which is dropped if the pool is full; one that it did not take goes to the
pool. Without a pool it waits for one. A copy that fails twice is tried again by ticks: this worker may lack descriptors
for a moment, and that is not the request's fault.
"""

from collections.abc import Callable
from dataclasses import dataclass

from alignedserve.core.errors import FailureKind
from alignedserve.worker_core.handoff import Contents, HandoffEnd, Lender, Outgoing, Sender
from alignedserve.worker_core.part import Commands
from alignedserve.worker_core.router_link import RouterLink
from prefill_worker.state import PrefillJob

_MOST_COPIES = 8  # that fail, of one request: the pool's memory is out of this worker's reach, perhaps not of another's


@dataclass(slots=True, eq=False)
class DepartingJob(Outgoing):
    """One job that leaves."""

    job: PrefillJob


class Departure:
    """Decides where jobs go, and what follows from their arrival or failure."""

    def __init__(self, lender: Lender, router: RouterLink, forget: Callable[[PrefillJob], Commands]) -> None:
        """`lender`: of buffers to decode workers. `forget`: removes a job that has left."""
        self.pool: str | None = None  # the pool that is linked
        self._lender = lender
        self._router = router
        self._forget = forget
        self.sender: Sender[DepartingJob] = Sender(
            reserved=lambda entry: [self.sender.copy(entry, tuple(entry.job.block_ids))],
            contents=_contents_of,
            ended=self._ended,
            aborted=lambda entry: self._forget(entry.job),
        )

    def begin(self, job: PrefillJob) -> Commands:
        is_bypass = job.bypass_to is not None and self._lender.lends_to(job.bypass_to)
        target = job.bypass_to if is_bypass else self.pool
        if target is None:
            return self._forget(job) if job.is_taken else ()
        job.leaving = entry = DepartingJob(job.request, job.attempt, target, job)
        kind = {"is_copy": job.is_taken, "may_wait": not job.is_taken, "is_best_effort": not job.is_real_time}
        return [self.sender.ask(entry, len(job.block_ids), **kind)]

    def _ended(self, entry: DepartingJob, how: HandoffEnd, now: float) -> Commands:
        job = entry.job
        job.leaving = None
        if entry.target == job.bypass_to and how is not HandoffEnd.UNKNOWN:
            job.bypass_to, job.is_taken = None, how is HandoffEnd.TAKEN
            return self.begin(job)
        is_optional = job.is_taken  # a decode worker has it, and the pool was to get a copy
        if how is HandoffEnd.FAILED:
            job.num_failed_copies += not entry.is_target_lost
            if job.num_failed_copies < _MOST_COPIES and not (is_optional and entry.is_target_lost):
                return self.begin(job) if job.num_failed_copies <= 1 else ()
        match how:
            case HandoffEnd.REFUSED if not is_optional:
                reason = "the KV pool is too small for it"
                reports = self._router.failed(job, FailureKind.UNSERVABLE, reason)
            case HandoffEnd.FAILED | HandoffEnd.UNKNOWN if not is_optional:
                reports = self._router.send(job.preempted(is_refused=how is HandoffEnd.FAILED))
            case _:
                reports = []
        return [*reports, *self._forget(job)]


def _contents_of(entry: DepartingJob, now: float) -> Contents:
    job, generated = entry.job, tuple(entry.job.generated_token_ids)
    return Contents(job.num_cached, generated, job.predicted_output_len, job.begun_s(now), service_s=0.0)
