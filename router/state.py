"""The router's records: what it tracks of each request, worker and pool."""

import enum
from dataclasses import dataclass, field

from alignedserve.core.attempts import is_same_epoch
from alignedserve.core.ids import BatchId, RequestId
from alignedserve.core.lifecycle import Stage, advance
from alignedserve.core.request import Request, RequestClass
from alignedserve.messages.workers import WorkerLoad, WorkerRegistered


@dataclass(slots=True)
class TrackedRequest:
    """Progress of one accepted request. It exists from admission until its terminal stage."""

    request: Request
    gateway: str
    predicted_output_len: float  # on arrival; the mean of its class until the predictor has said more
    is_length_predicted: bool = False  # it has
    stage: Stage = Stage.QUEUED
    holder: str | None = None  # the worker or pool that has it; None while queued
    generated_token_ids: tuple[int, ...] = ()  # known here only when they must be recomputed
    num_emitted: int = 0  # tokens that went out before whoever holds it now got it
    pool_epoch: int | None = None  # life of the pool that its prefill is to end in
    is_prefilled: bool = False  # prefilled, on its way to that pool
    destination: str | None = None  # perhaps on its way to this worker already
    attempt: int = 0  # the latest that is known of it (core/attempts.py); messages about an earlier one are stale
    copy_at: tuple[str, int] | None = None  # the pool, and its life, that may keep a copy of it
    pooled_s: float = 0.0  # when it came into the pool
    num_requeues: int = 0

    def move(self, stage: Stage, holder: str | None = None) -> None:
        """Take a legal step of the lifecycle."""
        self.stage = advance(self.stage, stage)
        self.holder = holder
        self.is_prefilled = False
        self.destination = None

    @property
    def is_real_time(self) -> bool:
        """Whether somebody waits for its tokens."""
        return self.request.request_class is RequestClass.REAL_TIME

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that a prefill worker has to compute for it."""
        return self.request.prompt_len + len(self.generated_token_ids)


@dataclass(frozen=True, slots=True)
class LengthPredicted:
    """Event: so many output tokens are expected of a request, in all. Comes when it is ready; nobody waits for it."""

    request_id: RequestId
    predicted_len: float


class BatchRequestKind(enum.Enum):
    """What a pool is asked for on behalf of a decode worker."""

    BATCH = "batch"  # the batch after the one that runs
    JOIN = "join"  # more of the lengths that run


@dataclass(frozen=True, slots=True)
class DispatchedPrefill:
    """A prefill that a worker has not yet reported as computed."""

    attempt: int
    num_tokens: int
    is_real_time: bool = False


@dataclass(slots=True)
class WorkerRecord:
    """One registered worker and what it was given."""

    name: str
    registered: WorkerRegistered
    load: WorkerLoad | None = None
    prefilling: dict[RequestId, DispatchedPrefill] = field(default_factory=dict)
    decoding: set[RequestId] = field(default_factory=set)  # running or candidates there; membership only
    pending_batch: BatchId | None = None  # an unanswered FormBatch
    requested_kind: BatchRequestKind = BatchRequestKind.BATCH  # by that one, or the last
    num_requested: int = 0  # requests that it may get by that one
    is_load_stale: bool = False  # a batch came since the last report
    refused_kinds: set[BatchRequestKind] = field(
        default_factory=set
    )  # asked in vain since the last news; membership only
    last_batch_s: float = float("-inf")  # when it last got a batch of its own

    @property
    def layout_digest(self) -> str:
        """Of its blocks."""
        return self.registered.layout_digest

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that it has still to compute."""
        return sum(prefill.num_tokens for prefill in self.prefilling.values())

    @property
    def num_real_time_tokens(self) -> int:
        """Of these, of real-time requests."""
        return sum(prefill.num_tokens for prefill in self.prefilling.values() if prefill.is_real_time)

    def complete_prefill(self, request_id: RequestId, attempt: int) -> bool:
        """It has computed this; False: nobody waits for that any more, though perhaps for a later attempt."""
        prefill = self.prefilling.get(request_id)
        if prefill is None or not is_same_epoch(prefill.attempt, attempt):
            return False
        del self.prefilling[request_id]
        return True

    @property
    def num_blocks_used(self) -> int:
        """As last reported."""
        return self.registered.num_blocks - self.load.num_free_blocks if self.load is not None else 0


@dataclass(slots=True)
class PoolRecord:
    """One registered pool."""

    name: str
    epoch: int  # differs between a pool and its restarted self
    num_blocks: int
    layout_digest: str = ""
    num_blocks_used: int = 0
    num_blocks_kept: int = 0
    large_requests: dict[RequestId, tuple[int, float]] = field(default_factory=dict)  # pooled: blocks, since when
    num_pooled: int = 0  # by the router's own count: RequestPooled less BatchReceived and drops
