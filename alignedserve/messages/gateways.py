"""What gateways say and hear: requests to the router, and tokens straight from the workers."""

import msgspec

from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, TokenLogprob
from alignedserve.messages.fields import Attempt, Count, FailureKind, NonNegative, Seconds, Text, TokenIds
from alignedserve.messages.iteration_log import IterationLogTotals
from alignedserve.messages.wire import Message


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


class LengthTotals(msgspec.Struct, frozen=True, array_like=True):
    """How well output lengths were foreseen, over finished requests."""

    num_finished: Count = 0
    num_predicted: Count = 0  # of those, not by the mean of their class
    num_tokens: Count = 0  # that all of them generated
    error_tokens: NonNegative = 0.0  # sum of |expected - generated|


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
    ledger: IterationLogTotals = IterationLogTotals()  # of all decode workers, since the router started
    lengths: LengthTotals = LengthTotals()  # since the router started


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
