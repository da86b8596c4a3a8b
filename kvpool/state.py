"""The pool's records: one lease per run of blocks that somebody may touch."""

import enum
from dataclasses import dataclass

from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.core.request import RequestClass
from alignedserve.messages.caches import BlocksWritten


class LeaseStage(enum.Enum):
    """Who may touch the blocks of a lease."""

    RESERVED = "reserved"  # a worker writes
    POOLED = "pooled"  # nobody; indexed, waiting for a batch
    GRANTED = "granted"  # a worker reads
    KEPT = "kept"  # nobody; a copy of what a worker has, there as long as there is room


@dataclass(slots=True)
class Lease:
    """Blocks of one request, from reservation to release. Their generation equals the lease id: it is never reused."""

    lease_id: LeaseId
    request_id: RequestId
    attempt: int
    block_ids: tuple[BlockId, ...]
    stage: LeaseStage
    holder: str  # the worker that writes or reads
    deadline_s: float  # RESERVED ends here
    is_copy: bool = False  # to be kept, never indexed
    is_void: bool = False  # granted, but the request is over: to be freed, not kept, when it is released
    content: BlocksWritten | None = None  # set once written

    @property
    def reclaim_key(self) -> tuple[bool, float, LeaseId]:
        """Kept copies go in this order: best-effort before real-time, the youngest first."""
        assert self.content is not None, "a copy of nothing"
        request = self.content.request
        return request.request_class is RequestClass.REAL_TIME, -request.arrival_s, self.lease_id


@dataclass(frozen=True, slots=True)
class Reservation:
    """A worker waiting for room."""

    request_id: RequestId
    attempt: int
    num_blocks: int
    worker: str
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class PooledRequest:
    """What a batch former sees of a request in the pool."""

    request_id: RequestId
    context_len: int
    num_blocks: int
    arrival_s: float
    urgent_at_s: float | None  # from this time on waiting longer would miss its deadline; None: it has none
