"""A request that comes to a worker with its cache: where that lies, and how far the request has got."""

from dataclasses import dataclass

from alignedserve.core.ids import BatchId, LeaseId
from alignedserve.messages.caches import BlockCopy, BlocksWritten, Handoff
from alignedserve.scheduling.scheduler_state import MovedProgress
from alignedserve.worker_core.handoff import BufferSlot
from alignedserve.worker_core.request import CacheStage, WorkerRequest


@dataclass(slots=True, eq=False)
class Candidate(WorkerRequest):
    """A request at this worker that is not in the running batch."""

    batch_id: BatchId
    lease_id: LeaseId | None = None  # the pool's copy is held for us
    pool_copy: BlockCopy | None = None
    slot: BufferSlot | None = None
    buffer_copy: BlockCopy | None = None
    must_stay: bool = False  # the pool had no free blocks for it, or is not beside its buffer
    has_lost_pool: bool = False  # while it was on its way back there
    may_prefetch: bool = True  # a prefill worker that has lost the pool answers at once, again and again
    first_token_s: float = 0.0
    last_token_s: float = 0.0  # or its arrival here
    service_s: float = 0.0  # spent in earlier iterations
    far_pool: str | None = None  # another node's pool that granted it; None: this node's

    @classmethod
    def of(
        cls, message: Handoff | BlocksWritten, attempt: int, batch_id: BatchId, stage: CacheStage, now: float
    ) -> "Candidate":
        first_token_s = now - message.begun_s
        return cls(
            message.request,
            attempt,
            list(message.generated_token_ids),
            batch_id,
            stage=stage,
            granted_s=now,
            predicted_output_len=message.predicted_output_len,
            first_token_s=first_token_s,
            last_token_s=first_token_s if len(message.generated_token_ids) == 1 else now,
            service_s=message.service_s,
        )

    @classmethod
    def of_handoff(cls, handoff: Handoff, batch_id: BatchId, now: float, *, far_pool: str | None = None) -> "Candidate":
        """Build the candidate that the pool granted. One of another node's pool is not copied into buffers of this."""
        made = cls.of(handoff, handoff.attempt, batch_id, CacheStage.AWAY, now)
        made.lease_id, made.pool_copy = handoff.lease_id, handoff.copy
        made.far_pool, made.may_prefetch = far_pool, far_pool is None
        return made

    @property
    def num_cached(self) -> int:
        copy = self.buffer_copy or self.pool_copy
        return copy.context_len if copy is not None else 0

    @property
    def num_copied_blocks(self) -> int:
        copy = self.buffer_copy or self.pool_copy
        return copy.num_blocks if copy is not None else 0

    def progress(self, num_cached: int, num_blocks: int) -> MovedProgress:
        expected = self.predicted_output_len or float(self.request.sampling.max_tokens)
        return MovedProgress(
            predicted_len=max(expected, 1.0),
            num_generated=len(self.generated_token_ids),
            num_cached=num_cached,
            num_blocks=num_blocks,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            service_s=self.service_s,
        )
