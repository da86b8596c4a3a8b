"""The prefill worker's records."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.core.ids import BlockId
from alignedserve.core.request import RequestClass
from alignedserve.messages.caches import Handoff, ReturnRequest
from alignedserve.messages.request_notes import Cause
from alignedserve.messages.workers import PrefillRequest
from alignedserve.prefix_cache.contexts import CachedContext
from alignedserve.worker_core.request import WorkerRequest


class JobStage(enum.Enum):
    """Stage of a job. Blocks are held from ASKING or COMPUTING until its end."""

    WAITING = "waiting"  # no blocks yet
    ASKING = "asking"  # the pool was asked for a copy of an earlier attempt
    LOADING = "loading"  # its copy comes from the pool
    COMPUTING = "computing"  # in the engine, or about to enter
    DEPARTING = "leaving"  # computed; waits for blocks at its target, or is being copied there


@dataclass(slots=True, eq=False)
class PrefillJob(WorkerRequest):
    """One request on this worker."""

    stage: JobStage = JobStage.WAITING
    block_ids: tuple[BlockId, ...] = ()
    is_retry: bool = False  # assigned to a worker before
    has_copy: bool = False  # the pool may keep a copy of it from then
    handoff: Handoff | None = None  # the pool's copy of an earlier attempt, to begin from
    bypass_to: str | None = None  # the decode worker that it is to be offered first
    target: str | None = None  # where it leaves for: the pool, or that decode worker
    is_taken: bool = False  # by a decode worker: what leaves for the pool now is a copy
    is_copying: bool = False  # the transfer thread reads its blocks: they must not be freed
    is_written: bool = False  # offered to its target, which may have taken it already
    context: CachedContext | None = None  # None: it shares nothing
    first_token_s: float | None = None  # when it was sampled here; None: not yet, or elsewhere

    @classmethod
    def of(cls, message: PrefillRequest) -> "PrefillJob":
        """Build the job that the router assigned."""
        return cls(
            message.request,
            message.attempt,
            list(message.generated_token_ids),
            predicted_output_len=message.predicted_output_len,
            is_retry=bool(message.generated_token_ids) or message.has_copy,
            has_copy=message.has_copy,
            bypass_to=message.bypass_to,
        )

    @property
    def is_real_time(self) -> bool:
        """Return whether a person waits for the answer."""
        return self.request.request_class is RequestClass.REAL_TIME

    @property
    def num_cached(self) -> int:
        """Tokens whose cache its blocks hold once it is computed: all but the one sampled last."""
        return self.context_len - (self.stage is JobStage.DEPARTING)

    def is_departing_to(self, peer: str, attempt: int) -> bool:
        """Return whether it waits for this peer's answer to this attempt."""
        is_waiting = self.stage is JobStage.DEPARTING and not self.is_copying
        return is_waiting and (self.target, self.attempt) == (peer, attempt)

    def num_usable(self, handoff: Handoff) -> int:
        """Return how many of its first tokens have their cache in this copy; at least one is left to compute.

        Tokens that an earlier attempt generated and the client never received may differ from the client's.
        """
        num_usable = min(handoff.copy.context_len, self.context_len - 1)
        num_generated = max(num_usable - self.request.prompt_len, 0)
        is_same = handoff.request.prompt_token_ids == self.request.prompt_token_ids and handoff.generated_token_ids[
            :num_generated
        ] == tuple(self.generated_token_ids[:num_generated])
        return num_usable if is_same else 0


def waiting_cause(job: PrefillJob, *, is_full: bool) -> Cause | None:
    """Return why a job is not computed, or does not leave; None: it is, or does. `is_full`: no more may hold blocks."""
    match job.stage:
        case JobStage.WAITING:
            return Cause.BATCH_FULL if is_full else Cause.BLOCKS_SHORT
        case JobStage.ASKING | JobStage.LOADING:
            return Cause.PREFETCH
        case JobStage.DEPARTING if not (job.is_copying or job.is_written or job.is_taken):
            return Cause.POOL_FULL
    return None


def waiting_jobs(jobs: Iterable[PrefillJob], *, real_time_first: bool) -> list[PrefillJob]:
    """Return jobs without blocks in order of arrival; with `real_time_first`, best-effort ones last."""
    waiting = [job for job in jobs if job.stage is JobStage.WAITING]
    if real_time_first:
        waiting.sort(key=lambda job: not job.is_real_time)
    return waiting


@dataclass(slots=True)
class ReturningRequest:
    """An evicted request on its way from a candidate buffer back to the pool."""

    peer: str  # the decode worker that evicted it
    link_epoch: int  # of that worker's link
    message: ReturnRequest
    is_reserved: bool = False  # the pool has reserved blocks for it
    is_written: bool = False  # offered to the pool, which may have taken it already
