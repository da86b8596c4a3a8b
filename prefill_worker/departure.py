"""Departure of a computed request from a prefill worker: to the pool, or first to a decode worker if it is urgent.

1. ReserveBlocks asks the target for blocks. 2. BlocksReserved: the request's blocks are copied there, beside the
running iteration. 3. BlocksWritten offers it. 4. BlocksTaken: the target owns it. A request that a decode worker took
is then offered to the pool as a copy, which is dropped if the pool is full; one that it refused goes to the pool.
"""

import enum
from typing import NamedTuple

from alignedserve.messages.caches import (
    BlockCopy,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    ReservationRefused,
    ReserveBlocks,
)
from alignedserve.messages.events import Send
from alignedserve.messages.iterations import BlocksOffloaded, OffloadBlocks
from prefill_worker.candidate_buffers import CandidateBuffers
from prefill_worker.state import PrefillJob


class JobEnd(enum.Enum):
    """Reason why a job has ended on this worker."""

    GONE = "gone"  # its receiver owns it, and no blocks are reserved for it
    UNKNOWN = "unknown"  # it was offered to a receiver that is lost; only the router can know whether that took it
    DROPPED = "dropped"  # it was aborted, and blocks may be reserved for it
    TOO_LARGE = "too large"  # for the pool, ever


class DepartureStep(NamedTuple):
    """Commands for a departing job, and whether it ends on this worker with them."""

    commands: tuple[Send | OffloadBlocks, ...] = ()
    end: JobEnd | None = None


class Departure:
    """Decides where jobs go and what follows from each answer. It changes jobs and keeps none."""

    def __init__(self, buffers: CandidateBuffers) -> None:
        self.pool: str | None = None  # the pool that is linked
        self._buffers = buffers

    def begin(self, job: PrefillJob) -> DepartureStep:
        """Ask the job's target for blocks; without a target it waits for the pool."""
        if job.bypass_to is not None and self._buffers.has_buffer(job.bypass_to):
            job.target = job.bypass_to
        else:
            job.target = self.pool
        job.is_written = False
        if job.target is None:
            return DepartureStep(end=JobEnd.GONE if job.is_taken else None)
        reserve = ReserveBlocks(
            job.request.request_id,
            job.attempt,
            len(job.block_ids),
            is_copy=job.is_taken,
            may_wait=not job.is_taken,
            is_best_effort=not job.is_real_time,
        )
        return DepartureStep((Send(job.target, reserve),))

    def answered(self, job: PrefillJob, message: BlocksReserved | BlocksTaken | ReservationRefused) -> DepartureStep:
        """Handle the answer that the job was waiting for."""
        match message:
            case BlocksReserved():
                return self._reserved(job, message)
            case BlocksTaken():
                return self._taken(job, message)
            case ReservationRefused():
                return self._refused(job)

    def offloaded(self, job: PrefillJob, event: BlocksOffloaded, now: float) -> DepartureStep:
        """Offer the copied blocks, or begin again if the copy failed."""
        command = event.command
        job.is_copying = False
        if job.is_aborted:
            return DepartureStep(end=JobEnd.DROPPED)
        if job.target != command.target or event.runs is None:
            return self.begin(job)
        assert command.lease_id is not None, "a copy out without a lease"
        copy = BlockCopy(command.generation, job.num_cached, event.runs)
        written = BlocksWritten(
            command.lease_id,
            copy,
            job.attempt,
            job.request,
            tuple(job.generated_token_ids),
            job.predicted_output_len,
            now - job.first_token_s if job.first_token_s is not None else 0.0,
        )
        job.is_written = True
        return DepartureStep((Send(command.target, written),))

    def target_lost(self, job: PrefillJob) -> DepartureStep:
        """Handle the loss of the job's target."""
        job.target = None
        if job.is_taken:  # only the pool's copy is lost, which is optional
            job.is_aborted = True
            return DepartureStep(end=None if job.is_copying else JobEnd.DROPPED)
        if job.is_written:
            return DepartureStep(end=JobEnd.UNKNOWN)
        return DepartureStep() if job.is_copying else self.begin(job)

    # --- inside

    def _reserved(self, job: PrefillJob, reserved: BlocksReserved) -> DepartureStep:
        assert job.target is not None, "blocks reserved for a job without a target"
        job.is_copying = True
        offload = OffloadBlocks(
            reserved.request_id,
            reserved.attempt,
            job.block_ids,
            job.target,
            reserved.block_ids,
            reserved.generation,
            reserved.lease_id,
        )
        return DepartureStep((offload,))

    def _taken(self, job: PrefillJob, message: BlocksTaken) -> DepartureStep:
        if job.target == job.bypass_to:
            job.bypass_to = None
            job.is_taken = message.is_accepted
            return self.begin(job)
        return DepartureStep(end=JobEnd.GONE) if message.is_accepted else self.begin(job)

    def _refused(self, job: PrefillJob) -> DepartureStep:
        if job.target == job.bypass_to:
            job.bypass_to = None
            return self.begin(job)
        return DepartureStep(end=JobEnd.GONE if job.is_taken else JobEnd.TOO_LARGE)
