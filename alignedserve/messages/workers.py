"""Messages between the router and the workers."""

from collections.abc import Sequence

import msgspec

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.core.request import Request
from alignedserve.messages.caches import BatchGranted, BlocksWritten
from alignedserve.messages.cluster_view import BatchShape, IterationLogTotals, WorkerSpeed
from alignedserve.messages.fields import Attempt, Count, PredictedLen, Seconds, Share, Text, TokenIds
from alignedserve.messages.wire import Message


class DecodedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that a worker decodes on while it has no router."""

    request_id: RequestId
    attempt: Attempt
    num_received: Count  # generated tokens that it came with, all of which others had sent to the client


class WorkerRegistered(Message, frozen=True):
    """Worker to router on every (re)connect: its kind and capacity, and what it decodes meanwhile.

    The router adopts a request once its gateway resumes it, and aborts the rest.
    """

    num_blocks: Count  # block storage of this worker
    block_size: Count  # token slots per block
    max_running_requests: Count
    pool_name: Text  # the pool of this worker's node
    can_prefill: bool
    can_decode: bool
    layout_digest: Text = ""  # of its blocks; all workers and pools of a cluster must have the same
    latest_attempt: Attempt = 0  # it has had; a router that is new goes on above it
    can_move: bool = False  # hands requests that it decodes over to others of its node that can, and takes theirs
    node: Text = ""  # where it runs; empty on a cluster of one host
    num_places: Count = 0  # requests in an iteration at most; 0: max_running_requests, which a policy may pause some of
    max_adapters: Count = 0  # LoRA adapters that its memory holds; 0: it takes none
    decoding: tuple[DecodedRequest, ...] = ()  # that it goes on with; it has dropped all others
    num_active: Count = 0  # of its node's workers that decode so many have work, and the others stand by; 0: all have
    speed: WorkerSpeed = WorkerSpeed()  # as measured at its start
    state_blocks: Count = 0  # of every request, for its states, beside the blocks of its tokens
    is_fcfs: bool = False  # it computes prompts in the order in which they come, whatever their class


class RegistrationRefused(Message, frozen=True):
    """Router to a worker or pool that cannot work with the others: it gets no work."""

    reason: Text


class PeersChanged(Message, frozen=True):
    """Router to decode worker: the prefill workers of its node, to which it keeps links.

    Router to elastic worker: the elastic workers of the same node to dial.
    Sent when it has registered, and whenever they change.
    """

    joined: tuple[WorkerName, ...]
    left: tuple[WorkerName, ...] = ()  # not to be dialled any more; a link that holds is kept
    is_complete: bool = False  # there are no others than those that joined


class PeerNeeded(Message, frozen=True):
    """Router to decode worker: it is about to exchange blocks with this prefill worker or pool of another node.

    Sent at every use. The worker keeps a link there, which it closes when it had no use for a minute.
    """

    peer: WorkerName


class PrefillRequest(Message, frozen=True):
    """Router to worker: prefill this context and emit its next token."""

    request: Request
    attempt: Attempt
    generated_token_ids: TokenIds = ()  # emitted in earlier attempts; recomputed with the prompt
    has_copy: bool = False  # the pool may keep a copy of an earlier attempt: send it FetchCopy first
    bypass_to: WorkerName | None = None  # urgent: offer it to this decode worker first, and to the pool only as a copy
    predicted_output_len: PredictedLen | None = None  # never above max_tokens; SetPredictedLength may replace it
    prefix_pool: WorkerName | None = None  # of another node, which keeps more of its prefix than worker and own pool
    begun_s: Seconds = 0.0  # since its first token, of one with generated tokens


class SetPredictedLength(Message, frozen=True):
    """Router to a worker that prefills: the prediction for a request dispatched before there was one. Ignored if the
    request has left."""

    request_id: RequestId
    attempt: Attempt  # of its PrefillRequest
    predicted_output_len: PredictedLen


class PrefillCompleted(Message, frozen=True):
    """Worker to router: the context is computed and its next token sent (colocated workers then keep the request)."""

    request_id: RequestId
    attempt: Attempt
    num_tokens: Count  # computed, for the throughput estimate


class RequestFinished(Message, frozen=True):
    """Worker to router: the last token is sent, the blocks are freed."""

    request_id: RequestId
    attempt: Attempt
    num_generated: Count


class MoveRequest(Message, frozen=True):
    """Router to worker: hand a decoding request over to another worker. Answered by the receiver's RequestMoved
    or by RequestStayed."""

    request_id: RequestId
    attempt: Attempt
    to: WorkerName


class RequestMoved(Message, frozen=True):
    """Worker to router: it has taken this request over from another worker."""

    request_id: RequestId
    attempt: Attempt  # under which it has it
    num_generated: Count  # tokens, by the workers before


class RequestStayed(Message, frozen=True):
    """Worker to router: it decodes a request on that it was to hand over."""

    request_id: RequestId
    attempt: Attempt


class RequestPreempted(Message, frozen=True):
    """Worker to router: recompute this request later. Memory was short, its handoff was refused, or the pool was lost
    while taking it."""

    request_id: RequestId
    attempt: Attempt
    generated_token_ids: TokenIds
    handoff_refused: bool = False


class AttemptFailed(Message, frozen=True):
    """Worker to router: a failure that a retry would repeat; the worker has freed the request."""

    request_id: RequestId
    attempt: Attempt
    kind: FailureKind
    reason: Text


ANY_LENGTH = 1 << 16  # the end of a range that holds every length: longer ones count as this where batches are formed
PACKED_FROM = 1  # the start of a range up to the longest context that slack has room for; others start at 16s


class JoinedBatch(msgspec.Struct, frozen=True, array_like=True):
    """A running batch that requests may join, and the half-open range of its context lengths."""

    batch_id: BatchId
    start: Count
    stop: Count


class DecodeDelay(msgspec.Struct, frozen=True, array_like=True):
    """What one more context costs, where attention waits for the longest (costmodel/straggler.py); else zeros."""

    iteration_s: Seconds = 0.0  # of the decodes of all requests that the worker holds
    even_len: Count = 0  # tokens of the longest context that delays no other
    longer_token_s: Seconds = 0.0  # by which each further token of the longest prolongs an iteration
    longest_len: Count = 0  # tokens of the longest context here
    num_longer: Count = 0  # contexts that are longer than `even_len`


class WorkerLoad(Message, frozen=True):
    """Worker to router, when it changed: counts for placement."""

    num_waiting: Count = 0  # incomplete prefills
    num_running: Count = 0
    num_candidate_requests: Count = 0  # to join the running batch
    num_batch_candidates: Count = 0  # of the next batch
    num_candidate_blocks: Count = 0  # decode blocks that both will need
    num_free_blocks: Count = 0
    num_handoffs_verified: Count = 0
    num_evictions: Count = 0
    num_reused_tokens: Count = 0  # of retried requests: taken from the pool's copies
    num_recomputed_tokens: Count = 0  # of requests that were dropped or retried: computed again
    running: JoinedBatch | None = None  # None: no batch runs, or one of unaligned lengths
    lean: Share = 1.0  # of its time, what its decodes leave for prompts; told by workers that hand requests over
    prompt_tokens_per_s: Count = 0  # that it computes with all of its time; 0: not told
    num_prefix_query_tokens: Count = 0  # of contexts that were looked up in the prefix cache, since it started
    num_prefix_hit_tokens: Count = 0  # of those, taken from it
    num_prefix_blocks: Count = 0  # cached now, those that requests use included
    num_prefix_evictions: Count = 0  # blocks that left the cache for others, since it started
    num_real_time_candidates: Count = 0  # of the next batches' candidates, where classes are known; of all, packed
    delay: DecodeDelay = DecodeDelay()  # of an elastic worker


class BlocksFetched(Message, frozen=True):
    """Decode worker to router: blocks came from another node's pool, for the cost of that link."""

    pool_name: Text
    num_blocks: Count
    duration_s: Seconds


class IterationLogReport(Message, frozen=True):
    """Decode worker to router, about once a second while it iterates: what its log gained since the last."""

    gained: IterationLogTotals
    num_tokens: Count = 0  # generated meanwhile
    batch: BatchShape = BatchShape()  # of the last iteration
    speed: WorkerSpeed = WorkerSpeed()  # where it has shown to be faster than at its start


def requests_of(message: Message) -> Sequence[Request]:
    """Return the requests that a worker has from this message on; none of most messages."""
    match message:
        case PrefillRequest() | BlocksWritten():
            return (message.request,)
        case BatchGranted():
            return [handoff.request for handoff in message.handoffs]
        case _:
            return ()
