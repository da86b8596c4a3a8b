"""What the rooms say to each other: every message, then the closed union that each room accepts.

KV never travels here (it lies in the pool's arena), and tokens never pass through the router.

Links are independent, so a message about a request can arrive after the request has moved on. Every message about a
request that was given out carries its `attempt` (core/attempts.py): a smaller number than the one known is stale, and
is ignored, or answered by telling the sender to let go of just that attempt and what came before it.
"""

import enum
from typing import Annotated

import msgspec

from alignedserve.core.ids import BatchId, BlockId, LeaseId, RequestId, WorkerName
from alignedserve.core.request import FinishReason, Request, TokenLogprob
from alignedserve.messages.handshake import Ping
from alignedserve.messages.ledger import LedgerTotals
from alignedserve.messages.wire import Message

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 31)], ...]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]


NO_BATCH = BatchId(0)  # of requests that came by themselves


class FailureKind(enum.Enum):
    """Why a request that was accepted will not be completed."""

    OVERLOADED = "overloaded"  # no room and no time left to wait for it
    WORKER_LOST = "worker_lost"  # its worker died after tokens had gone out
    INTERNAL = "internal"  # a fault of ours, logged where it happened
    UNSERVABLE = "unservable"  # can never fit this cluster


# --- gateway <-> router -------------------------------------------------------------------------------------------


class SubmitRequest(Message, frozen=True):
    """Gateway to router: serve this. Answered by tokens from a worker, RequestRejected or RequestFailed."""

    request: Request


class AbortRequest(Message, frozen=True):
    """Gateway to router, router to whoever holds it: the client is gone. May be repeated; unknown ids are ignored."""

    request_id: RequestId
    attempt: Attempt | None = None  # only this attempt and earlier ones; None: the request as such


class RequestRejected(Message, frozen=True):
    """Router to gateway: not accepted; nothing is held."""

    request_id: RequestId
    reason: Text
    retry_after_s: Seconds  # predicted time until the queue has drained enough


class RequestFailed(Message, frozen=True):
    """Router to gateway: accepted, but will not complete."""

    request_id: RequestId
    kind: FailureKind
    reason: Text


class RequestInterrupted(Message, frozen=True):
    """Router to gateway: whoever held this request is lost. Answered by ResumeRequest, or AbortRequest."""

    request_id: RequestId


class ResumeRequest(Message, frozen=True):
    """Gateway to router: go on with this request after the tokens that the client has."""

    request: Request
    generated_token_ids: TokenIds


class ClusterStatus(Message, frozen=True):
    """Router to every gateway, about once a second: counts for /metrics and /ready."""

    num_queued: Count
    num_prefilling: Count
    num_pooled: Count
    num_decoding: Count
    num_prefill_workers: Count
    num_decode_workers: Count
    num_pool_blocks: Count
    num_pool_blocks_used: Count
    num_worker_blocks: Count  # block storage of all workers
    num_worker_blocks_used: Count
    num_preemptions: Count  # since the router started, like the next three
    num_handoffs_verified: Count
    num_handoffs_refused: Count
    num_evictions: Count = 0
    num_pool_blocks_kept: Count = 0  # among the used: copies of what workers have
    num_reused_tokens: Count = 0  # of requests given out again, since the router started, like the next
    num_recomputed_tokens: Count = 0
    ledger: LedgerTotals = LedgerTotals()  # of all decode workers, since the router started


# --- worker -> gateway --------------------------------------------------------------------------------------------


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request. `first_index` lets the gateway order deltas of two workers and drop repeats."""

    request_id: RequestId
    first_index: Count  # place of the first of these tokens in the output
    token_ids: TokenIds
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token when asked for
    finish_reason: FinishReason | None = None  # set on the last delta; with STOP the last token is the stop token


class TokensEmitted(Message, frozen=True):
    """Worker to gateway, one per iteration: everything new for that gateway's requests."""

    deltas: tuple[TokenDelta, ...]


class PromptScored(Message, frozen=True):
    """Prefill worker to gateway: log-probabilities of prompt tokens, in order, for requests that asked."""

    request_id: RequestId
    first_position: Count  # position in the prompt of the first entry (the very first token has none)
    entries: tuple[TokenLogprob, ...]


# --- router <-> workers -------------------------------------------------------------------------------------------


class WorkerRegistered(Message, frozen=True):
    """Worker to router on every (re)connect: what I am and what I can hold."""

    num_blocks: Count  # block storage of this worker
    block_size: Count  # token slots per block
    max_running: Count
    pool_name: Text  # the pool of this worker's node
    can_prefill: bool
    can_decode: bool
    layout_digest: Text = ""  # of its blocks; all workers and pools of a cluster must have the same


class RegistrationRefused(Message, frozen=True):
    """Router to a worker or pool that cannot work with the others: it gets nothing to do."""

    reason: Text


class PrefillRequest(Message, frozen=True):
    """Router to worker: compute this context and its next token."""

    request: Request
    attempt: Attempt
    generated_token_ids: TokenIds = ()  # emitted in earlier attempts; recomputed with the prompt
    has_copy: bool = False  # the pool may keep a copy of an earlier attempt: ask it before computing everything
    bypass_to: WorkerName | None = None  # urgent: offer it to this decode worker first, and to the pool only as a copy


class PrefillCompleted(Message, frozen=True):
    """Worker to router: the context is computed and its next token is out (colocated workers then keep it)."""

    request_id: RequestId
    attempt: Attempt
    num_tokens: Count  # tokens computed, for the throughput estimate


class RequestFinished(Message, frozen=True):
    """Worker to router: last token is out, blocks are freed."""

    request_id: RequestId
    attempt: Attempt
    num_generated: Count


class RequestPreempted(Message, frozen=True):
    """Worker to router: recompute it later. There was no room to go on, its handoff was refused, or the pool was lost
    in the middle of taking it."""

    request_id: RequestId
    attempt: Attempt
    generated_token_ids: TokenIds
    handoff_refused: bool = False


class AttemptFailed(Message, frozen=True):
    """Worker to router: a fault that another attempt would not mend; nothing is held here any more."""

    request_id: RequestId
    attempt: Attempt
    kind: FailureKind
    reason: Text


class JoinedBatch(msgspec.Struct, frozen=True, array_like=True):
    """A running batch that others may join, and the context lengths that it spans now, half-open."""

    batch_id: BatchId
    start: Count
    stop: Count


class WorkerLoad(Message, frozen=True):
    """Worker to router, when it changed: counts for placement."""

    num_waiting: Count = 0  # prefills not yet begun or not complete
    num_running: Count = 0
    num_candidate_requests: Count = 0  # to join the running batch
    num_batch_candidates: Count = 0  # of the batch to come
    num_candidate_blocks: Count = 0  # decode blocks that both will take
    num_free_blocks: Count = 0
    num_handoffs_verified: Count = 0
    num_evictions: Count = 0
    num_reused_tokens: Count = 0  # of requests given out before: taken from the pool's copies
    num_recomputed_tokens: Count = 0  # of the same requests: computed again
    running: JoinedBatch | None = None  # None: nothing runs, or requests of any length


class LedgerReport(Message, frozen=True):
    """Decode worker to router, about once a second while it iterates: what its ledger gained since the last report."""

    gained: LedgerTotals


# --- workers <-> pool ---------------------------------------------------------------------------------------------


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


# --- decode worker <-> prefill worker: the candidate buffer that the one has in the other's memory -----------------
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


# --- pool <-> router ----------------------------------------------------------------------------------------------


class PoolRegistered(Message, frozen=True):
    """Pool to router on every (re)connect."""

    num_blocks: Count
    layout_digest: Text = ""


class RequestPooled(Message, frozen=True):
    """Pool to router: indexed and ready for a batch."""

    request_id: RequestId
    attempt: Attempt
    context_len: Count
    num_blocks: Count


class FormBatch(Message, frozen=True):
    """Router to pool: form one batch for this worker. Answered by BatchFormed, and by the worker's BatchReceived."""

    batch_id: BatchId
    worker: WorkerName
    max_blocks: Count
    max_requests: Count
    min_requests: Count = 1  # fewer are not worth a batch of their own, unless there are no more
    joins: JoinedBatch | None = None  # not a new batch: only what is of similar length as this running one


class CopyKept(Message, frozen=True):
    """Pool to router: I keep a copy of a request that went past me to a decode worker."""

    request_id: RequestId
    attempt: Attempt


class BatchFormed(Message, frozen=True):
    """Pool to router: these requests are on their way to that worker; none: nothing fits, or it is not linked."""

    batch_id: BatchId
    worker: WorkerName
    members: tuple[tuple[RequestId, Attempt], ...]  # with their attempts


class BatchReceived(Message, frozen=True):
    """Decode worker to router: these requests are here. Until then they are still the pool's."""

    batch_id: BatchId  # NO_BATCH: straight from a prefill worker
    members: tuple[tuple[RequestId, Attempt], ...]  # with their attempts


class CopyLost(Message, frozen=True):
    """Pool to router: this attempt was on its way to a worker that is gone."""

    request_id: RequestId
    attempt: Attempt


class PoolLoad(Message, frozen=True):
    """Pool to router, when it changed."""

    num_blocks_used: Count
    num_pooled: Count
    num_reserved: Count
    num_blocks_kept: Count = 0  # among the used: copies that would be given up for room


class DropRequest(Message, frozen=True):
    """Router to pool: forget this attempt at a request and earlier ones, copies too. Unknown ones are ignored."""

    request_id: RequestId
    attempt: Attempt


RouterInbound = (
    SubmitRequest
    | ResumeRequest
    | AbortRequest
    | AttemptFailed
    | WorkerRegistered
    | PrefillCompleted
    | RequestFinished
    | RequestPreempted
    | WorkerLoad
    | LedgerReport
    | PoolRegistered
    | RequestPooled
    | BatchFormed
    | BatchReceived
    | CopyKept
    | CopyLost
    | PoolLoad
    | Ping
)
GatewayInbound = (
    RequestRejected | RequestFailed | RequestInterrupted | ClusterStatus | TokensEmitted | PromptScored | Ping
)
PoolInbound = (
    ReserveBlocks
    | CancelReservation
    | BlocksWritten
    | LeasesReleased
    | LeasesReturned
    | FetchCopy
    | FormBatch
    | DropRequest
    | RegistrationRefused
    | Ping
)
PrefillWorkerInbound = (
    PrefillRequest
    | AbortRequest
    | ArenaOffered
    | BlocksReserved
    | ReservationRefused
    | BlocksTaken
    | CopyGranted
    | CopyMissing
    | PrefetchBlocks
    | CancelPrefetch
    | ReturnRequest
    | RegistrationRefused
    | Ping
)
DecodeWorkerInbound = (
    PrefillRequest
    | AbortRequest
    | ArenaOffered
    | BatchGranted
    | ReserveBlocks
    | CancelReservation
    | BlocksWritten
    | BlocksPrefetched
    | RequestReturned
    | RegistrationRefused
    | Ping
)
