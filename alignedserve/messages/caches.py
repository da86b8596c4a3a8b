"""What is said about blocks: between workers and the pool, and between a decode worker and the prefill worker in whose
memory it has a candidate buffer. The blocks themselves never travel in a message."""

import enum

import msgspec

from alignedserve.core.ids import BatchId, BlockId, LeaseId, RequestId
from alignedserve.core.request import Request
from alignedserve.messages.fields import Attempt, Count, PredictedLen, Text, TokenIds
from alignedserve.messages.wire import Message


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous run of blocks and the checksum of its bytes."""

    first_block: Count
    num_blocks: Count
    checksum: int  # XXH3-64 of the run's bytes, seeded with the number of blocks before it; unsigned


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Where a request's cache lies in somebody's blocks (the pool's, a candidate buffer's), and how to verify it."""

    generation: Count  # found on every one of the blocks before and after they are read
    context_len: Count  # tokens whose cache lies in the blocks
    runs: tuple[BlockRun, ...]  # in the order of the request's blocks

    @property
    def num_blocks(self) -> int:
        """Blocks that the runs name, as told: nothing of it is checked."""
        return sum(run.num_blocks for run in self.runs)


class ArenaOffered(Message, frozen=True):
    """Pool to worker, prefill worker to decode worker, on every (re)connect: blocks of mine that you may use.

    Leases of an earlier arena of this peer are void.
    """

    path: Text  # of the file to map; empty: it is no file
    num_blocks: Count
    block_bytes: Count
    layout_digest: Text
    served_at: Text = ""  # where a block server serves the same blocks; empty: nowhere
    transports: tuple[Text, ...] = ("shm",)  # ways to reach the blocks, in no order
    file_id: Text = ""  # host, file system and file of the path, for whoever may see another file there; empty: unknown


class ReserveBlocks(Message, frozen=True):
    """Worker to pool: I need room for this request. Answered when there is room, in order. Repeating it replaces.

    Also prefill to decode worker, about the buffer which that one has in the prefill worker's memory (an urgent request
    that does not wait in the pool); answered at once.
    """

    request_id: RequestId
    attempt: Attempt
    num_blocks: Count
    is_copy: bool = False  # only to be kept beside the one that a decode worker has
    may_wait: bool = True  # for room; else it is refused when there is none now


class CancelReservation(Message, frozen=True):
    """Worker to pool: the request ended before its blocks were written. Unknown ids are ignored."""

    request_id: RequestId
    attempt: Attempt


class BlocksReserved(Message, frozen=True):
    """Answer to ReserveBlocks: write here. The lease ends at its deadline unless BlocksWritten came."""

    request_id: RequestId
    attempt: Attempt
    lease_id: LeaseId
    generation: Count  # stamped on the blocks in the arena; a later lease of a block has a larger one
    block_ids: tuple[BlockId, ...]


class ReservationRefused(Message, frozen=True):
    """Answer to ReserveBlocks: this many blocks can never be had here; for a buffer or a copy: not now."""

    request_id: RequestId
    attempt: Attempt


class BlocksWritten(Message, frozen=True):
    """Whoever reserved blocks: they are filled, the request is offered."""

    lease_id: LeaseId
    copy: BlockCopy
    attempt: Attempt
    request: Request
    generated_token_ids: TokenIds  # the last of them is not yet in the cache
    predicted_output_len: PredictedLen | None = None  # of its PrefillRequest


class BlocksTaken(Message, frozen=True):
    """Answer to BlocksWritten: the request is mine now; or the lease did not hold, try again."""

    request_id: RequestId
    attempt: Attempt
    is_accepted: bool


class Handoff(msgspec.Struct, frozen=True, array_like=True):
    """One pooled request on its way to a worker. Everything the receiver checks is in here."""

    request: Request
    attempt: Attempt
    generated_token_ids: TokenIds  # the last of them is not yet in the cache
    lease_id: LeaseId
    copy: BlockCopy
    predicted_output_len: PredictedLen | None = None  # of its PrefillRequest


class BatchGranted(Message, frozen=True):
    """Pool to decode worker: these requests are yours, shortest context first. Answer with LeasesReleased or
    LeasesReturned for each."""

    batch_id: BatchId
    handoffs: tuple[Handoff, ...]
    joins: BatchId | None = None  # the batch which was running when these were asked for, to join it
    is_aligned: bool = True  # of similar length, so worth keeping apart from others


class LeasesReleased(Message, frozen=True):
    """Worker to pool: copied (or given up). The pool keeps its copy while there is room."""

    lease_ids: tuple[LeaseId, ...]


class LeasesReturned(Message, frozen=True):
    """Decode worker to pool: granted but not used, plans have changed; index these requests again."""

    lease_ids: tuple[LeaseId, ...]


class FetchCopy(Message, frozen=True):
    """Prefill worker to pool: do you keep a copy of an earlier attempt at this request?"""

    request_id: RequestId
    attempt: Attempt  # of the asker


class CopyGranted(Message, frozen=True):
    """Pool to prefill worker, answer to FetchCopy: yes; answer with LeasesReleased."""

    handoff: Handoff
    attempt: Attempt  # of the asker


class CopyMissing(Message, frozen=True):
    """Pool to prefill worker, answer to FetchCopy: no; compute everything."""

    request_id: RequestId
    attempt: Attempt


# The decode worker says what lies where in its buffer; the prefill worker copies between the pool's arena and it.


class PrefetchBlocks(Message, frozen=True):
    """Decode to prefill worker: copy this from the pool into these blocks of my buffer."""

    request_id: RequestId
    attempt: Attempt
    source: BlockCopy
    block_ids: tuple[BlockId, ...]
    generation: Count  # to stamp the buffer's blocks with


class CancelPrefetch(Message, frozen=True):
    """Decode to prefill worker: plans have changed. Answered by the prefetch's own BlocksPrefetched."""

    request_id: RequestId
    generation: Count


class BlocksPrefetched(Message, frozen=True):
    """Prefill to decode worker, one for every PrefetchBlocks: it is there; or nobody writes there any more."""

    request_id: RequestId
    generation: Count
    copy: BlockCopy | None  # None: cancelled, or what lay in the pool did not verify
    is_refused: bool = False  # it did not verify


class ReturnRequest(Message, frozen=True):
    """Decode to prefill worker: take this evicted request from my buffer back to the pool."""

    request: Request
    attempt: Attempt
    generated_token_ids: TokenIds
    copy: BlockCopy
    predicted_output_len: PredictedLen | None = None  # of its PrefillRequest


class ReturnOutcome(enum.Enum):
    """Where a request is after a ReturnRequest."""

    TAKEN = "taken"  # in the pool
    STAYED = "stayed"  # in the buffer, nobody else has it
    UNKNOWN = "unknown"  # offered to a pool that was lost: perhaps there


class RequestReturned(Message, frozen=True):
    """Prefill to decode worker, one for every ReturnRequest."""

    request_id: RequestId
    attempt: Attempt
    outcome: ReturnOutcome
