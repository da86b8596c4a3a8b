"""What the router and the workers say to each other."""

import msgspec

from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.core.request import Request
from alignedserve.messages.fields import Attempt, Count, FailureKind, PredictedLen, Text, TokenIds
from alignedserve.messages.iteration_log import IterationLogTotals
from alignedserve.messages.wire import Message


class WorkerRegistered(Message, frozen=True):
    """Worker to router on every (re)connect: what I am and what I can hold."""

    num_blocks: Count  # block storage of this worker
    block_size: Count  # token slots per block
    max_running_requests: Count
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
    predicted_output_len: PredictedLen | None = None  # never above max_tokens; SetPredictedLength may replace it


class SetPredictedLength(Message, frozen=True):
    """Router to a worker that prefills: the prediction for a request that it was given before there was one. Ignored
    where the request has left."""

    request_id: RequestId
    attempt: Attempt  # of its PrefillRequest
    predicted_output_len: PredictedLen


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


class IterationLogReport(Message, frozen=True):
    """Decode worker to router, about once a second while it iterates: what its ledger gained since the last report."""

    gained: IterationLogTotals
