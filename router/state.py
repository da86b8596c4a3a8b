"""The router's records: what it tracks of each request, worker and pool."""

from dataclasses import dataclass, field

from alignedserve.core.ids import BatchId, RequestId
from alignedserve.core.lifecycle import Stage, advance
from alignedserve.core.request import Request
from alignedserve.messages.links import WorkerLoad, WorkerRegistered


@dataclass(slots=True)
class TrackedRequest:
    """Progress of one accepted request. It exists from admission until its terminal stage."""

    request: Request
    gateway: str
    predicted_output_len: float
    stage: Stage = Stage.QUEUED
    holder: str | None = None  # the worker or pool that has it; None while queued
    generated_token_ids: tuple[int, ...] = ()  # known here only when they must be recomputed
    pool_life: int | None = None  # life of the pool that its prefill is to end in
    is_computed: bool = False  # prefilled, on its way to that pool
    granted_to: str | None = None  # pooled, but on its way to this worker
    attempt: int = 0  # number of its latest giving-out, never used again; messages about another are stale
    num_requeues: int = 0

    def move(self, stage: Stage, holder: str | None = None) -> None:
        """Take a legal step of the lifecycle."""
        self.stage = advance(self.stage, stage)
        self.holder = holder
        self.is_computed = False
        self.granted_to = None

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that a prefill worker has to compute for it."""
        return self.request.prompt_len + len(self.generated_token_ids)


@dataclass(slots=True)
class WorkerRecord:
    """One registered worker and what it was given."""

    name: str
    registered: WorkerRegistered
    load: WorkerLoad | None = None
    prefilling: dict[RequestId, int] = field(default_factory=dict)  # tokens handed over and not reported computed
    decoding: set[RequestId] = field(default_factory=set)  # running or candidates there; membership only
    forming: BatchId | None = None  # an unanswered FormBatch
    has_news: bool = True  # something changed since a batch was last asked for; without, the answer would be the same

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that it has still to compute."""
        return sum(self.prefilling.values())

    @property
    def wants_batches(self) -> bool:
        """Whether to ask for a batch now: it only decodes, no answer is outstanding, and it may be another one."""
        return not self.registered.can_prefill and self.forming is None and self.has_news

    @property
    def num_blocks_used(self) -> int:
        """As last reported."""
        return self.registered.num_blocks - self.load.num_free_blocks if self.load is not None else 0


@dataclass(slots=True)
class PoolRecord:
    """One registered pool."""

    name: str
    life: int  # differs between a pool and its restarted self
    num_blocks: int
    num_blocks_used: int = 0
    num_pooled: int = 0  # by the router's own count: RequestPooled less BatchReceived and drops
