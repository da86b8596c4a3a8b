"""How a computed request leaves a prefill worker: for the pool; or, when it is urgent, for a decode worker first.

1. ReserveBlocks asks for room where it is to go. 2. BlocksReserved: its blocks are copied there, beside the running
iteration. 3. BlocksWritten offers it. 4. BlocksTaken: it is its receiver's. What a decode worker took is then offered
to the pool as a copy, which is given up where there is no room; what it refused goes to the pool like any other.
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
    """Why a job is over here."""

    GONE = "gone"  # it is somebody else's, and nobody holds anything for it
    UNKNOWN = "unknown"  # it was offered to a receiver that is lost; only the router can know what became of it
    DROPPED = "dropped"  # it was aborted, and room may be reserved for it
    TOO_LARGE = "too large"  # for the pool, ever


class LeavingStep(NamedTuple):
    """What to do about a job next, and whether it ends here with that."""

    commands: tuple[Send | OffloadBlocks, ...] = ()
    end: JobEnd | None = None


class Leaving:
    """Decides where jobs go and what follows from each answer. Changes the jobs, and keeps none."""

    def __init__(self, buffers: CandidateBuffers) -> None:
        self.pool: str | None = None  # the pool that is linked
        self._buffers = buffers

    def begin(self, job: PrefillJob) -> LeavingStep:
        """Ask for room where the job is to go; without anywhere to go it waits for the pool."""
        if job.bypass_to is not None and self._buffers.has_buffer(job.bypass_to):
            job.target = job.bypass_to
        else:
            job.target = self.pool
        job.is_written = False
        if job.target is None:
            return LeavingStep(end=JobEnd.GONE if job.is_taken else None)
        is_copy = job.is_taken
        reserve = ReserveBlocks(job.request.request_id, job.attempt, len(job.block_ids), is_copy, may_wait=not is_copy)
        return LeavingStep((Send(job.target, reserve),))

    def answered(self, job: PrefillJob, message: BlocksReserved | BlocksTaken | ReservationRefused) -> LeavingStep:
        """The word that the job was waiting for."""
        match message:
            case BlocksReserved():
                return self._reserved(job, message)
            case BlocksTaken():
                return self._taken(job, message)
            case ReservationRefused():
                return self._refused(job)

    def offloaded(self, job: PrefillJob, event: BlocksOffloaded) -> LeavingStep:
        """Its blocks are copied, well or not."""
        command = event.command
        job.is_copying = False
        if job.is_aborted:
            return LeavingStep(end=JobEnd.DROPPED)
        if job.target != command.target or event.runs is None:
            return self.begin(job)
        assert command.lease_id is not None, "a copy out without a lease"
        copy = BlockCopy(command.generation, job.num_cached, event.runs)
        written = BlocksWritten(
            command.lease_id, copy, job.attempt, job.request, tuple(job.generated_token_ids), job.predicted_output_len
        )
        job.is_written = True
        return LeavingStep((Send(command.target, written),))

    def target_lost(self, job: PrefillJob) -> LeavingStep:
        """Whoever it was leaving for is gone."""
        job.target = None
        if job.is_taken:  # only the copy is lost, and nobody waits for it
            job.is_aborted = True
            return LeavingStep(end=None if job.is_copying else JobEnd.DROPPED)
        if job.is_written:
            return LeavingStep(end=JobEnd.UNKNOWN)
        return LeavingStep() if job.is_copying else self.begin(job)

    # --- inside

    def _reserved(self, job: PrefillJob, reserved: BlocksReserved) -> LeavingStep:
        assert job.target is not None, "room for a job that leaves for nowhere"
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
        return LeavingStep((offload,))

    def _taken(self, job: PrefillJob, message: BlocksTaken) -> LeavingStep:
        if job.target == job.bypass_to:
            job.bypass_to = None
            job.is_taken = message.is_accepted
            return self.begin(job)
        return LeavingStep(end=JobEnd.GONE) if message.is_accepted else self.begin(job)

    def _refused(self, job: PrefillJob) -> LeavingStep:
        if job.target == job.bypass_to:
            job.bypass_to = None
            return self.begin(job)
        return LeavingStep(end=JobEnd.GONE if job.is_taken else JobEnd.TOO_LARGE)
