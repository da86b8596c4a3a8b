"""Messages about blocks: between workers and the pool, and between a decode worker and the prefill worker that hosts
its candidate buffer. The blocks themselves never travel in a message."""

import enum

import msgspec

from alignedserve.core.ids import BatchId, BlockId, LeaseId, RequestId
from alignedserve.core.request import Request
from alignedserve.messages.fields import Attempt, Count, PredictedLen, Seconds, Text, TokenIds
from alignedserve.messages.wire import Message


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous run of blocks and the checksum of its bytes."""

    first_block: Count
    num_blocks: Count
    checksum: (
        int  # of its blocks' digests and their places (`num_before` of BlockCopy, runtime.kv.block_checksums); unsigned
    )


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Location of a request's cache in the blocks of the pool or a candidate buffer, and how to verify it."""

    generation: Count  # stamped on each of the blocks before and after they are read
    context_len: Count  # tokens whose cache is in the blocks
    runs: tuple[BlockRun, ...]  # in the order of the request's blocks
    num_before: Count = 0  # blocks of a prefix before the first of these: those of `runs` follow them

    @property
    def num_blocks(self) -> int:
        """Number of blocks named by the runs, unchecked."""
        return sum(run.num_blocks for run in self.runs)


class ArenaOffered(Message, frozen=True):
    """Pool to worker, prefill worker to decode worker, on every (re)connect: blocks for the receiver to use.

    Leases of an earlier arena of this peer are void.
    """

    path: Text  # of the file to map; empty: it is no file
    num_blocks: Count
    block_bytes: Count
    layout_digest: Text
    served_at: Text = ""  # where a block server serves the same blocks; empty: nowhere
    transports: tuple[Text, ...] = ("shm",)  # ways to reach the blocks, in no order
    file_id: Text = (
        ""  # host, file system and file of the path, as another host may have another file there; empty: unknown
    )
    pool_name: Text = ""  # of a candidate buffer: the pool whose blocks can be copied to and from it; empty: any


class ReserveBlocks(Message, frozen=True):
    """Worker to pool: reserve blocks for this request. Answered once they are free, in order. A repetition replaces it.

    Also worker to worker, to hand a request over: about the blocks that the sender lends the receiver.
    Prefill to decode worker, about the latter's buffer in the prefill worker's memory (an urgent request that does
    not wait in the pool); answered at once.
    """

    request_id: RequestId
    attempt: Attempt
    num_blocks: Count
    is_copy: bool = False  # only kept, as a copy of what a decode worker has
    may_wait: bool = True  # False: refused unless blocks are free now
    is_best_effort: bool = False  # it waits for others, and leaves room to them


class CancelReservation(Message, frozen=True):
    """Worker to pool: the request ended before its blocks were written. Unknown ids are ignored."""

    request_id: RequestId
    attempt: Attempt


class BlocksReserved(Message, frozen=True):
    """Answer to ReserveBlocks: write here. The lease ends at its deadline unless BlocksWritten has come."""

    request_id: RequestId
    attempt: Attempt
    lease_id: LeaseId
    generation: Count  # stamped on the blocks in the arena; a later lease of a block has a larger one
    block_ids: tuple[BlockId, ...]


class ReservationRefused(Message, frozen=True):
    """Answer to ReserveBlocks: this many blocks will never be free here; for a buffer or a copy: not now."""

    request_id: RequestId
    attempt: Attempt


class BlocksWritten(Message, frozen=True):
    """Sender of ReserveBlocks to its receiver: the blocks are written, the request is offered."""

    lease_id: LeaseId
    copy: BlockCopy
    attempt: Attempt
    request: Request
    generated_token_ids: TokenIds  # the last of them is not yet in the cache
    predicted_output_len: PredictedLen | None = None  # of its PrefillRequest
    begun_s: Seconds = 0.0  # since its first token
    service_s: Seconds = 0.0  # that it spent in iterations


class BlocksTaken(Message, frozen=True):
    """Answer to BlocksWritten: the receiver owns the request now; or the lease was invalid, try again."""

    request_id: RequestId
    attempt: Attempt
    is_accepted: bool


class Handoff(msgspec.Struct, frozen=True, array_like=True):
    """One pooled request on its way to a worker, with everything that the receiver checks."""

    request: Request
    attempt: Attempt
    generated_token_ids: TokenIds  # the last of them is not yet in the cache
    lease_id: LeaseId
    copy: BlockCopy
    predicted_output_len: PredictedLen | None = None  # of its PrefillRequest
    begun_s: Seconds = 0.0  # since its first token
    service_s: Seconds = 0.0  # that it spent in iterations


class BatchGranted(Message, frozen=True):
    """Pool to decode worker: these requests are granted, shortest context first. Each is answered by LeasesReleased or
    LeasesReturned."""

    batch_id: BatchId
    handoffs: tuple[Handoff, ...]
    joins: BatchId | None = None  # the batch to join, which was running when these were requested
    is_aligned: bool = True  # of similar length, so worth keeping apart from others


class LeasesReleased(Message, frozen=True):
    """Worker to pool: copied (or no longer needed). The pool keeps its copy while blocks are free."""

    lease_ids: tuple[LeaseId, ...]


class LeasesReturned(Message, frozen=True):
    """Decode worker to pool: granted but not used; index these requests again."""

    lease_ids: tuple[LeaseId, ...]


class DecodePace(Message, frozen=True):
    """Decode worker to its pool, when it changed by a tenth or more: how long an iteration of what runs there takes."""

    iteration_s: Seconds


class FetchCopy(Message, frozen=True):
    """Prefill worker to pool: grant a copy of an earlier attempt at this request, if there is one."""

    request_id: RequestId
    attempt: Attempt  # of the asker


class CopyGranted(Message, frozen=True):
    """Answer to FetchCopy: the copy, to be answered by LeasesReleased."""

    handoff: Handoff
    attempt: Attempt  # of the asker


class CopyMissing(Message, frozen=True):
    """Answer to FetchCopy: there is no copy; compute everything."""

    request_id: RequestId
    attempt: Attempt


# The decode worker decides what is where in its buffer; the prefill worker copies between the pool's arena and it.


class PrefetchBlocks(Message, frozen=True):
    """Decode to prefill worker: copy this from the pool into these blocks of the sender's buffer."""

    request_id: RequestId
    attempt: Attempt
    source: BlockCopy
    block_ids: tuple[BlockId, ...]
    generation: Count  # to be stamped on the buffer's blocks
    is_best_effort: bool = False  # copied after real-time requests


class CancelPrefetch(Message, frozen=True):
    """Decode to prefill worker: cancel a prefetch, which is still answered by its BlocksPrefetched."""

    request_id: RequestId
    generation: Count


class BlocksPrefetched(Message, frozen=True):
    """Prefill to decode worker, one for every PrefetchBlocks: it is complete, or cancelled and no longer written."""

    request_id: RequestId
    generation: Count
    copy: BlockCopy | None  # None: cancelled, or the pool's copy did not verify
    is_refused: bool = False  # it did not verify


class ReturnRequest(Message, frozen=True):
    """Decode to prefill worker: return this evicted request from the sender's buffer to the pool."""

    request: Request
    attempt: Attempt
    generated_token_ids: TokenIds
    copy: BlockCopy
    predicted_output_len: PredictedLen | None = None  # of its PrefillRequest
    begun_s: Seconds = 0.0  # since its first token
    service_s: Seconds = 0.0  # that it spent in iterations


class ReturnOutcome(enum.Enum):
    """Location of a request after a ReturnRequest."""

    TAKEN = "taken"  # in the pool
    STAYED = "stayed"  # only in the buffer
    UNKNOWN = "unknown"  # offered to a pool that was lost; perhaps in it


class RequestReturned(Message, frozen=True):
    """Prefill to decode worker, one for every ReturnRequest."""

    request_id: RequestId
    attempt: Attempt
    outcome: ReturnOutcome
