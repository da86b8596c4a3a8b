"""Messages between the router and the pools."""

from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.messages.cluster_view import LengthTree
from alignedserve.messages.fields import NO_BATCH, Attempt, Count, Text
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import JoinedBatch


class PoolRegistered(Message, frozen=True):
    """Pool to router on every (re)connect."""

    num_blocks: Count
    layout_digest: Text = ""
    latest_attempt: Attempt = 0  # it has had; a router that is new goes on above it


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
    min_requests: Count = 1  # fewer are not worth a batch, unless there are no more
    joins: JoinedBatch | None = None  # None: a new batch; else only requests of similar length to this running one
    is_for_real_time: bool = False  # a batch that goes before best-effort ones; of these only what their floor lets go
    by_turn: bool = False  # of any lengths, in the order in which prompts were given out: several tenants share


class CopyKept(Message, frozen=True):
    """Pool to router: the pool keeps a copy of a request that bypassed it."""

    request_id: RequestId
    attempt: Attempt


class BatchFormed(Message, frozen=True):
    """Pool to router: these requests are on their way to the worker. Empty: none fits, or the worker is not linked."""

    batch_id: BatchId
    worker: WorkerName
    members: tuple[tuple[RequestId, Attempt], ...]  # with their attempts


class BatchReceived(Message, frozen=True):
    """Decode worker to router: these requests have arrived. Until then the pool owns them."""

    batch_id: BatchId  # NO_BATCH: straight from a prefill worker
    members: tuple[tuple[RequestId, Attempt], ...]  # with their attempts
    pool_name: Text = ""  # the pool of another node that granted them; empty: that of its own node, or none


class CopyLost(Message, frozen=True):
    """Pool to router: this attempt was on its way to a worker that was lost."""

    request_id: RequestId
    attempt: Attempt
    worker: Text = ""
    batch_id: BatchId = NO_BATCH  # that it was granted in, which may never arrive


class PoolLoad(Message, frozen=True):
    """Pool to router, when it changed."""

    num_blocks_used: Count
    num_pooled: Count
    num_reserved: Count
    num_blocks_kept: Count = 0  # among the used: copies that can be evicted
    lengths: LengthTree = LengthTree()  # of the pooled requests


class DropRequest(Message, frozen=True):
    """Router to pool: free this attempt at a request and earlier ones, copies included. Unknown ones are ignored."""

    request_id: RequestId
    attempt: Attempt
