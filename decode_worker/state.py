"""The decode worker's records."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.core.attempts import is_same_epoch
from alignedserve.core.ids import BatchId, BlockId, LeaseId
from alignedserve.core.request import Request, SampledToken
from alignedserve.messages.caches import BlockCopy, Handoff
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.gateways import TokenDelta
from alignedserve.messages.iterations import delta_of
from alignedserve.messages.workers import RequestPreempted, SetPredictedLength


@dataclass(slots=True)
class RunningRequest:
    """One request in the running batch."""

    request: Request
    attempt: int
    generated_token_ids: list[int]
    block_ids: list[BlockId]
    num_computed: int  # tokens whose cache lies in its blocks
    batch_id: BatchId = NO_BATCH
    granted_s: float = 0.0  # when it came to this worker
    is_aborted: bool = False
    predicted_output_len: float | None = None
    is_stalled: bool = False  # waits for a block that an eviction is about to free
    context_len: int = field(init=False)  # prompt and generated tokens; the next iteration reads or computes all
    max_context_len: int = field(init=False)

    def __post_init__(self) -> None:
        # Kept, not worked out: they are read for every request in every iteration.
        self.context_len = self.request.prompt_len + len(self.generated_token_ids)
        self.max_context_len = self.request.max_context_len

    @classmethod
    def of_candidate(cls, candidate: "Candidate", block_ids: tuple[BlockId, ...], num_cached: int) -> "RunningRequest":
        """As it enters, with the cache of so many tokens in these blocks."""
        generated = list(candidate.generated_token_ids)
        running = cls(candidate.request, candidate.attempt, generated, list(block_ids), num_cached)
        running.batch_id, running.granted_s = candidate.batch_id, candidate.granted_s
        running.predicted_output_len = candidate.predicted_output_len
        return running

    def note_token(self, token_id: int) -> None:
        """One more token was sampled, so the cache of all before it lies in the blocks."""
        self.generated_token_ids.append(token_id)
        self.num_computed = self.context_len
        self.context_len += 1

    def sampled(self, token: SampledToken, eos_token_ids: frozenset[int]) -> TokenDelta:
        """Its context is computed and this is its next token: note it, and say what the gateway is told."""
        index = len(self.generated_token_ids)
        self.note_token(token.token_id)
        return delta_of(self.request, token, index, eos_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled: 1, but at first more where the copy was shorter."""
        return self.context_len - self.num_computed


class CachePlace(enum.Enum):
    """Where a candidate's cache lies."""

    POOL = "pool"  # in the pool's arena, under a lease
    COMING = "coming"  # there, and on its way into a prefill worker's memory
    BUFFER = "buffer"  # in a prefill worker's memory
    RETURNING = "returning"  # there, and on its way back to the pool


@dataclass(frozen=True, slots=True)
class BufferSlot:
    """Blocks of the buffer that this worker has in a prefill worker's memory."""

    peer: str
    life: int  # of the link to it: a buffer does not outlive its link
    block_ids: tuple[BlockId, ...]
    generation: int  # stamped on them by whoever writes there


@dataclass(slots=True)
class Candidate:
    """A request at this worker that is not in the running batch."""

    request: Request
    attempt: int
    generated_token_ids: tuple[int, ...]
    batch_id: BatchId
    granted_s: float
    place: CachePlace
    lease_id: LeaseId | None = None  # the pool's copy is held for us
    pool_copy: BlockCopy | None = None
    slot: BufferSlot | None = None
    buffer_copy: BlockCopy | None = None
    is_aborted: bool = False  # over, but something still reads or writes its blocks
    must_stay: bool = False  # the pool had no room for it
    has_lost_pool: bool = False  # while it was on its way back there
    predicted_output_len: float | None = None
    may_prefetch: bool = True  # a prefill worker that has lost the pool answers at once, again and again
    context_len: int = field(init=False)  # prompt and generated tokens
    max_context_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.context_len = self.request.prompt_len + len(self.generated_token_ids)
        self.max_context_len = self.request.max_context_len

    @classmethod
    def of_handoff(cls, handoff: Handoff, batch_id: BatchId, now: float) -> "Candidate":
        """From the pool."""
        generated = handoff.generated_token_ids
        candidate = cls(handoff.request, handoff.attempt, generated, batch_id, now, CachePlace.POOL)
        candidate.lease_id, candidate.pool_copy = handoff.lease_id, handoff.copy
        candidate.predicted_output_len = handoff.predicted_output_len
        return candidate

    @property
    def num_copied_blocks(self) -> int:
        """Blocks of its cache, wherever it lies."""
        copy = self.buffer_copy or self.pool_copy
        return copy.num_blocks if copy is not None else 0


def is_up_to(one: Candidate | RunningRequest, attempt: int | None) -> bool:
    """Whether it is of this attempt or an earlier one; None: of any."""
    return attempt is None or one.attempt <= attempt


def set_predicted_length(known: Iterable[Candidate | RunningRequest | None], message: SetPredictedLength) -> None:
    """Note it of those that it is said of."""
    for one in known:
        if one is not None and is_same_epoch(one.attempt, message.attempt):
            one.predicted_output_len = message.predicted_output_len


def preempted(one: Candidate | RunningRequest, *, is_refused: bool = False) -> RequestPreempted:
    """It is to be computed again elsewhere: its only cache is gone. `is_refused`: the copy did not verify."""
    generated = tuple(one.generated_token_ids)
    return RequestPreempted(one.request.request_id, one.attempt, generated, handoff_refused=is_refused)


@dataclass(slots=True)
class Loading:
    """A candidate on its way into the running batch: its cache is being copied into blocks of ours."""

    candidate: Candidate
    block_ids: tuple[BlockId, ...]


@dataclass(slots=True)
class Evicting:
    """A request on its way out of the running batch: its cache is being copied into a buffer."""

    candidate: Candidate  # as it will be
    block_ids: tuple[BlockId, ...]  # ours, free when the copy is done
    num_cached: int  # tokens whose cache is copied
