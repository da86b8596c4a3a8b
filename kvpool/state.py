"""The pool's records: one lease per request that holds arena blocks."""

import enum
from dataclasses import dataclass

from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.messages.links import BlocksWritten


class LeaseStage(enum.Enum):
    """Who may touch the blocks of a lease."""

    RESERVED = "reserved"  # a prefill worker writes
    POOLED = "pooled"  # nobody; indexed, waiting for a batch
    GRANTED = "granted"  # a decode worker reads


@dataclass(slots=True)
class Lease:
    """Blocks of one request, from reservation to release. `generation` equals the lease id: neither is ever reused."""

    lease_id: LeaseId
    request_id: RequestId
    attempt: int
    block_ids: tuple[BlockId, ...]
    stage: LeaseStage
    holder: str  # the worker that writes or reads
    deadline_s: float  # RESERVED and GRANTED end here
    content: BlocksWritten | None = None  # set once written


@dataclass(frozen=True, slots=True)
class Reservation:
    """A worker waiting for room."""

    request_id: RequestId
    attempt: int
    num_blocks: int
    worker: str


@dataclass(frozen=True, slots=True)
class PooledRequest:
    """What a batch former sees of a request in the pool."""

    request_id: RequestId
    context_len: int
    num_blocks: int
    arrival_s: float
    urgent_at_s: float | None  # from this time on waiting longer would miss its deadline; None: no deadline
