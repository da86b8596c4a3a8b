"""The pool's records of leases, reservations and pooled requests."""

import enum
from dataclasses import dataclass

from alignedserve.core.class_floor import TurnClass
from alignedserve.core.ids import BatchId, BlockId, LeaseId, RequestId
from alignedserve.messages.caches import BlocksWritten, Handoff
from alignedserve.messages.fields import NO_BATCH
from alignedserve.worker_core.handoff import is_described
from alignedserve.worker_core.request import urgent_at_s

NO_GENERATION = 0


@dataclass(frozen=True, slots=True)
class SetBlockGeneration:
    """Command: write this generation into the arena's table for each of these blocks."""

    block_ids: tuple[BlockId, ...]
    generation: int


class LeaseStage(enum.Enum):
    """Stages of a lease, by the process that may touch its blocks."""

    RESERVED = "reserved"  # a worker writes them
    POOLED = "pooled"  # none; indexed, waiting for a batch
    GRANTED = "granted"  # a worker reads them
    KEPT = "kept"  # none; a copy of what a worker has, evicted when blocks are short


@dataclass(slots=True)
class Lease:
    """Blocks of one request, from reservation to release. Their generation equals the lease id: it is never reused."""

    lease_id: LeaseId
    request_id: RequestId
    attempt: int
    block_ids: tuple[BlockId, ...]
    stage: LeaseStage
    holder: str  # the worker that writes or reads
    deadline_s: float  # end of RESERVED
    is_copy: bool = False  # to be kept, never indexed
    is_void: bool = False  # granted, but the request has ended: freed, not kept, when released
    content: BlocksWritten | None = None  # once written
    written_s: float = 0.0
    batch_id: BatchId = NO_BATCH  # that it was last granted in

    @property
    def reclaim_key(self) -> tuple[bool, float, LeaseId]:
        assert self.content is not None, "a copy of nothing"
        request = self.content.request
        return request.is_real_time, -request.arrival_s, self.lease_id

    def handoff(self, now: float) -> Handoff:
        content = self.content
        assert content is not None, "a grant of nothing"
        return Handoff(
            content.request,
            self.attempt,
            content.generated_token_ids,
            self.lease_id,
            content.copy,
            content.predicted_output_len,
            content.begun_s + now - self.written_s,
            content.service_s,
        )

    def is_described_by(self, peer: str, written: BlocksWritten, block_size: int, state_blocks: int = 0) -> bool:
        is_holder = self.stage is LeaseStage.RESERVED and self.holder == peer
        is_its = (written.request.request_id, written.attempt) == (self.request_id, self.attempt)
        return is_holder and is_its and is_described(written, self.block_ids, self.lease_id, block_size, state_blocks)


@dataclass(frozen=True, slots=True)
class Reservation:
    """A ReserveBlocks waiting for free blocks."""

    request_id: RequestId
    attempt: int
    num_blocks: int
    worker: str
    is_copy: bool = False
    is_best_effort: bool = False


@dataclass(frozen=True, slots=True)
class PooledRequest:
    """A request in the pool as batch formers see it."""

    request_id: RequestId
    context_len: int
    num_blocks: int
    arrival_s: float
    urgent_at_s: float | None  # waiting longer than this would miss its deadline; None: it has none
    turn_class: TurnClass = TurnClass.ON_TIME
    turn: int = 0  # when the router gave out its prompt, compared with others
    ttft_s: float = 0.0  # the objective

    @classmethod
    def of(cls, lease: Lease, tpot_s: float | None) -> "PooledRequest":
        content = lease.content
        assert content is not None, "nothing to index"
        num_blocks = len(lease.block_ids)
        return cls(
            lease.request_id,
            content.copy.context_len,
            num_blocks,
            content.request.arrival_s,
            urgent_at_s(content.request, len(content.generated_token_ids), tpot_s),
            _class_of(content, lease.written_s),
            lease.attempt,
            content.request.slo.ttft_s or 0.0,
        )


def _class_of(content: BlocksWritten, written_s: float) -> TurnClass:
    request = content.request
    if not request.is_real_time:
        return TurnClass.BEST_EFFORT
    first_token_s, ttft_s = written_s - content.begun_s, request.slo.ttft_s
    is_late = ttft_s is not None and first_token_s > request.arrival_s + ttft_s
    return TurnClass.LATE if is_late else TurnClass.ON_TIME
