"""The decode worker's records."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from typing_extensions import override

from alignedserve.core.ids import BatchId, BlockId, LeaseId
from alignedserve.core.lifecycle import is_same_epoch
from alignedserve.core.request import SampledToken
from alignedserve.messages.caches import BlockCopy, BlocksWritten, Handoff
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.gateways import TokenDelta
from alignedserve.messages.workers import SetPredictedLength
from alignedserve.scheduling.scheduler_state import MovedProgress
from alignedserve.worker_core.handoff.buffer_space import BufferSlot
from alignedserve.worker_core.request import WorkerRequest


@dataclass(slots=True, eq=False)
class RunningRequest(WorkerRequest):
    """One request in the running batch."""

    block_ids: list[BlockId]
    num_computed: int  # tokens whose cache lies in its blocks
    batch_id: BatchId = NO_BATCH
    first_token_s: float = field(default=0.0, kw_only=True)
    is_prefilled: bool = field(default=True, kw_only=True)
    is_stalled: bool = False  # waits for a block that an eviction is about to free

    @classmethod
    def of_candidate(cls, candidate: "Candidate", block_ids: tuple[BlockId, ...], num_cached: int) -> "RunningRequest":
        """Build it as it enters, with the cache of `num_cached` tokens in these blocks."""
        return cls(
            candidate.request,
            candidate.attempt,
            candidate.generated_token_ids,
            list(block_ids),
            num_cached,
            candidate.batch_id,
            first_token_s=candidate.first_token_s,
            granted_s=candidate.granted_s,
            predicted_output_len=candidate.predicted_output_len,
        )

    @override
    def append(self, token: SampledToken, eos_token_ids: frozenset[int]) -> TokenDelta:
        """Add the next token: the cache of all tokens before it lies in the blocks."""
        self.num_computed = self.context_len
        return WorkerRequest.append(self, token, eos_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled: 1, or more at first where the copy was shorter."""
        return self.context_len - self.num_computed


class CacheLocation(enum.Enum):
    """Location of a candidate's cache."""

    POOL = "pool"  # in the pool's arena, under a lease
    PREFETCHING = "coming"  # there, and on its way into a prefill worker's memory
    BUFFER = "buffer"  # in a prefill worker's memory
    RETURNING = "returning"  # there, and on its way back to the pool


@dataclass(slots=True, eq=False)
class Candidate(WorkerRequest):
    """A request at this worker that is not in the running batch."""

    batch_id: BatchId
    location: CacheLocation
    lease_id: LeaseId | None = None  # the pool's copy is held for us
    pool_copy: BlockCopy | None = None
    slot: BufferSlot | None = None
    buffer_copy: BlockCopy | None = None
    must_stay: bool = False  # the pool had no free blocks for it, or is not beside its buffer
    has_lost_pool: bool = False  # while it was on its way back there
    may_prefetch: bool = True  # a prefill worker that has lost the pool answers at once, again and again
    first_token_s: float = 0.0
    last_token_s: float = 0.0  # or when it came here, if that is not known
    service_s: float = 0.0  # that it spent in iterations before
    far_pool: str | None = None  # the pool of another node that granted it; None: that of this node

    @classmethod
    def of(
        cls, message: Handoff | BlocksWritten, attempt: int, batch_id: BatchId, location: CacheLocation, now: float
    ) -> "Candidate":
        """Build the candidate that a message describes; what else follows from its location, the caller sets."""
        first_token_s = now - message.begun_s
        return cls(
            message.request,
            attempt,
            list(message.generated_token_ids),
            batch_id,
            location,
            granted_s=now,
            predicted_output_len=message.predicted_output_len,
            first_token_s=first_token_s,
            last_token_s=first_token_s if len(message.generated_token_ids) == 1 else now,
            service_s=message.service_s,
        )

    @classmethod
    def of_handoff(cls, handoff: Handoff, batch_id: BatchId, now: float, *, far_pool: str | None = None) -> "Candidate":
        """Build the candidate that the pool granted. One of another node's pool is not copied into buffers of this."""
        made = cls.of(handoff, handoff.attempt, batch_id, CacheLocation.POOL, now)
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


def set_predicted_length(known: Iterable[WorkerRequest], message: SetPredictedLength) -> bool:
    """Set it on the request's records that belong to the message's epoch; return whether there are any."""
    current = [record for record in known if is_same_epoch(record.attempt, message.attempt)]
    for record in current:
        record.predicted_output_len = message.predicted_output_len
    return bool(current)


@dataclass(slots=True)
class Loading:
    """A candidate on its way into the running batch: its cache is being copied into this worker's blocks."""

    candidate: Candidate
    block_ids: tuple[BlockId, ...]
