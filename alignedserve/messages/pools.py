"""What the router and the pools say to each other."""

from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.messages.fields import Attempt, Count, Text
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import JoinedBatch


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
