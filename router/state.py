"""The router's records of requests and workers."""

import enum
import heapq
import math
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from alignedserve.core.class_floor import turn_due_s
from alignedserve.core.ids import BatchId, RequestId
from alignedserve.core.lifecycle import Stage, advance, is_same_epoch
from alignedserve.core.request import Request, RequestClass
from alignedserve.messages.cluster_view import BatchShape, LengthTree
from alignedserve.messages.prefixes import BLOCK_NAME_BYTES
from alignedserve.messages.workers import PACKED_FROM, DecodeDelay, IterationLogReport, WorkerLoad, WorkerRegistered

_KEPT_SHARE = 1 / 8  # of the places of a worker that does both phases, from best effort
FORGIVEN_TOKENS = 256  # of an answer: what has come so much further has not lost its holders by its own fault
_USUAL_TOKENS_PER_S = 5000  # of prompts, where workers do not tell their speed


@dataclass(slots=True)
class TrackedRequest:
    """Progress of one accepted request, from admission until its terminal stage."""

    request: Request
    gateway: str
    predicted_output_len: float  # as of arrival; the mean of its class until the predictor has answered
    is_length_predicted: bool = False  # the predictor has answered
    stage: Stage = Stage.QUEUED
    holder: str | None = None  # the worker or pool that has it; None while queued
    generated_token_ids: tuple[int, ...] = ()  # known here only when they must be recomputed
    num_emitted: int = 0  # tokens sent to the client before the current holder got the request
    pool_epoch: int | None = None  # epoch of the pool that takes its blocks after prefill
    is_prediction_late: bool = False  # it came after this dispatch: later holders are told it again
    is_prefilled: bool = False  # prefill is complete, the blocks are on their way to that pool
    destination: str | None = None  # the worker that it may already be on its way to
    attempt: int = 0  # the latest known (core/lifecycle.py); messages with a smaller one are stale
    copy_at: tuple[str, int] | None = None  # the pool that may keep a copy, and that pool's epoch
    pooled_s: float = 0.0  # when it entered the pool
    charged_len: float | None = None  # of its answer, as its tenant was charged for it; None: it was not yet
    has_been_taken: bool = False  # out of the queue: it counts among what its tenant has
    num_retries: int = 0  # after lost holders and refused handoffs
    refused_s: float = -math.inf  # when a refused handoff counted last
    num_moves: int = 0  # ordered, between workers that decode it
    dispatched_s: float | None = None  # when a worker first got its prompt
    prefilled_s: float | None = None  # when its first token was there
    block_names: bytes = b""  # of its full blocks, by which it is placed where they are cached (prefix_index.py)

    def move(self, stage: Stage, holder: str | None = None) -> None:
        self.stage = advance(self.stage, stage)
        self.holder = holder
        self.is_prefilled = False
        self.destination = None

    def set_generated(self, token_ids: tuple[int, ...]) -> None:
        if len(token_ids) - self.num_emitted >= FORGIVEN_TOKENS:
            self.num_retries = min(self.num_retries, 1)  # the loss that has brought it here counts
        self.generated_token_ids = token_ids
        self.num_emitted = len(token_ids)

    def begun_s(self, now: float) -> float:
        """Return the time since its first token; where that was sampled under an earlier router, since it was due."""
        if not self.num_emitted:
            return 0.0
        request, slo = self.request, self.request.slo
        first_s = self.prefilled_s
        if first_s is None:
            due_s = (
                now - self.num_emitted * (slo.tpot_s or 0.0) if slo.ttft_s is None else request.arrival_s + slo.ttft_s
            )
            first_s = max(due_s, request.arrival_s)
        return max(now - first_s, 0.0)

    @property
    def is_real_time(self) -> bool:
        return self.request.is_real_time

    @property
    def adapter(self) -> bytes:
        return self.request.adapter.digest if self.request.adapter is not None else b""

    @property
    def first_due_s(self) -> float:
        ttft_s = self.request.slo.ttft_s
        return math.inf if ttft_s is None or self.num_emitted else self.request.arrival_s + ttft_s

    @property
    def next_late_s(self) -> float:
        tpot_s = self.request.slo.tpot_s
        return self.pooled_s + tpot_s if self.is_real_time and tpot_s is not None else math.inf

    @property
    def turn_due_s(self) -> float:
        """Return the time from which it is late in the queue: of no objective at all always, as in workers."""
        return turn_due_s(self.request, has_begun=self.num_emitted > 0)

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens that a prefill worker has to compute; an encoder's passes count as those they cost."""
        return self.request.prompt_len + len(self.generated_token_ids) + self.request.num_encoder_tokens


@dataclass(frozen=True, slots=True)
class LengthPredicted:
    """Event: the predictor's estimate of a request's total output tokens. Nothing waits for it."""

    request_id: RequestId
    predicted_len: float


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Event: these workers get nothing new from now on, and no others. Repeated for as long as they drain."""

    draining: tuple[str, ...]  # with the pools of whole nodes, whose requests go elsewhere at once
    moved: tuple[str, ...] = ()  # of those, the ones all of whose requests go elsewhere now


class BatchKind(enum.Enum):
    """Kinds of FormBatch that the router sends to a pool on behalf of a decode worker."""

    BATCH = "batch"  # the next batch
    JOIN = "join"  # requests of similar length, to join the running batch
    REAL_TIME = "real-time"  # a batch that goes before best-effort ones


@dataclass(frozen=True, slots=True)
class DispatchedPrefill:
    """A prefill given to a worker and not yet reported as completed."""

    attempt: int
    num_tokens: int  # to compute there: without tokens known to be cached
    is_real_time: bool = False
    due_s: float = math.inf  # when its first token is late
    block_names: bytes = b""  # of the blocks that it computes and then has cached
    adapter: bytes = b""  # digest of the adapter that it needs; empty: none


class PrefixHit(NamedTuple):
    """Part of a request that a worker need not compute."""

    num_tokens: int = 0  # tokens to load from its node's pool count less
    num_blocks: int = 0  # in its own cache


NO_HIT = PrefixHit()


def dispatched(tracked: TrackedRequest, hit: PrefixHit) -> DispatchedPrefill:
    names = tracked.block_names[hit.num_blocks * BLOCK_NAME_BYTES :]
    num_tokens = tracked.num_prefill_tokens - hit.num_tokens
    return DispatchedPrefill(
        tracked.attempt, num_tokens, tracked.is_real_time, tracked.first_due_s, names, tracked.adapter
    )


@dataclass(slots=True)
class WorkDone:
    """What a worker has done since it registered."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    wall_s: float = 0.0
    compute_s: float = 0.0
    batch: BatchShape = field(default_factory=BatchShape)  # of the last iteration that it told of

    def add(self, report: IterationLogReport) -> None:
        gained = report.gained
        self.num_tokens += report.num_tokens
        self.wall_s += gained.wall_s
        self.compute_s += gained.prepare_s + gained.forward_s + gained.sampling_s
        self.batch = report.batch


@dataclass(slots=True)
class WorkerRecord:
    """One registered worker and the requests it holds. Changed by the placement alone, which keeps it in order."""

    name: str
    registered: WorkerRegistered
    load: WorkerLoad | None = None
    prefilling: dict[RequestId, DispatchedPrefill] = field(default_factory=dict)  # changed by the methods below
    num_prefill_tokens: int = 0  # of prompts that it has yet to compute
    num_real_time_tokens: int = 0  # those of real-time requests
    num_real_time_prompts: int = 0
    late: dict[RequestId, None] = field(default_factory=dict)  # real-time prompts among them that are late by now
    num_late_tokens: int = 0  # those of these
    num_promised: int = 0  # tokens of prompts that its room is promised to
    decoding: set[RequestId] = field(default_factory=set)  # running or candidate; membership only
    decoding_real_time: set[RequestId] = field(default_factory=set)  # of those, real-time ones; membership only
    coming: set[RequestId] = field(default_factory=set)  # straight from prefill workers; membership only
    pending_batch: BatchId | None = None  # of a FormBatch without an answer
    asked_pool: str = ""  # that was asked for it, or for the last one
    requested_kind: BatchKind = BatchKind.BATCH  # of that FormBatch, or the last one
    num_requested: int = 0  # its `max_requests`
    is_load_stale: bool = False  # the worker got a batch since its last report
    # Since the last change, membership only: answered with an empty batch; pools of other nodes that had none for it.
    refused_kinds: set[BatchKind] = field(default_factory=set)
    refusing_pools: set[str] = field(default_factory=set)
    last_batch_s: float = float("-inf")  # when it last got a new batch
    is_draining: bool = False  # it gets nothing new: it drains, or stands by
    is_standby: bool = False  # it waits for the loss of another of its node
    registration: int = 0  # which of all of this router it is
    done: WorkDone = field(default_factory=WorkDone)  # for people who look on

    def start_prefill(self, request_id: RequestId, prefill: DispatchedPrefill) -> None:
        self.end_prefill(request_id)
        self.prefilling[request_id] = prefill
        self.num_prefill_tokens += prefill.num_tokens
        if prefill.is_real_time:
            self.num_real_time_tokens += prefill.num_tokens
            self.num_real_time_prompts += 1

    def complete_prefill(self, request_id: RequestId, attempt: int) -> DispatchedPrefill | None:
        prefill = self.prefilling.get(request_id)
        if prefill is None or not is_same_epoch(prefill.attempt, attempt):
            return None
        return self.end_prefill(request_id)

    def end_prefill(self, request_id: RequestId) -> DispatchedPrefill | None:
        prefill = self.prefilling.pop(request_id, None)
        if prefill is not None:
            self.num_prefill_tokens -= prefill.num_tokens
            if prefill.is_real_time:
                self.num_real_time_tokens -= prefill.num_tokens
                self.num_real_time_prompts -= 1
            if request_id in self.late:
                del self.late[request_id]
                self.num_late_tokens -= prefill.num_tokens
        return prefill

    def note_late(self, request_id: RequestId, attempt: int) -> None:
        prefill = self.prefilling.get(request_id)
        if prefill is not None and prefill.attempt == attempt and request_id not in self.late:
            self.late[request_id] = None
            self.num_late_tokens += prefill.num_tokens

    def num_tokens_before(self, *, is_real_time: bool) -> int:
        """Return the tokens of prompts that it computes before a prompt given to it now.

        Before a real-time prompt go punctual real-time ones, before best effort all: unless its policy is FCFS.
        """
        passes = is_real_time and not self.registered.is_fcfs
        return self.num_real_time_tokens - self.num_late_tokens if passes else self.num_prefill_tokens

    def wait_s(self, *, is_real_time: bool) -> float:
        """Return the predicted time until it could begin with a prompt that is given to it now.

        Example: 3 000 tokens before it at 5 000 tokens/s: 0.6 s. Decodes do not count: urgent prompts go before
        them. Workers that do not tell their speed are compared by tokens.
        """
        return self.num_tokens_before(is_real_time=is_real_time) / self.prompt_tokens_per_s

    @property
    def prompt_tokens_per_s(self) -> int:
        return (self.load.prompt_tokens_per_s or 1) if self.load is not None else 1

    def seconds_as_wait(self, seconds: float) -> float:
        tells_speed = self.load is not None and self.load.prompt_tokens_per_s
        return seconds if tells_speed else seconds * _USUAL_TOKENS_PER_S

    def has_room(
        self,
        num_tokens: int,
        allowance: int,
        *,
        beside: RequestClass | None,
        leaves_room: bool,
        passes_late: bool = False,
    ) -> bool:
        """Return whether it may be given a prompt of that many tokens; a prompt above the allowance waits for all
        others.

        `beside`: only prompts of this class count; None: all do. `passes_late`: late real-time prompts do not count, as
        the worker computes them later. A worker of both phases takes any prompt, except that best effort leaves it an
        eighth of its places (`leaves_room`).
        """
        if self.registered.can_decode:
            return not leaves_room or self.num_held < (1.0 - _KEPT_SHARE) * self.registered.max_running_requests
        match beside:
            case RequestClass.REAL_TIME:
                num_before = self.num_real_time_tokens - passes_late * self.num_late_tokens
            case RequestClass.BEST_EFFORT:
                num_before = self.num_prefill_tokens - self.num_real_time_tokens
            case None:
                num_before = self.num_prefill_tokens
        return not self.prefilling or num_tokens <= allowance - num_before

    @property
    def num_places(self) -> int:
        registered = self.registered
        return (registered.num_places or registered.max_running_requests) if registered.can_decode else 0

    def num_prompts(self, *, is_real_time: bool) -> int:
        return self.num_real_time_prompts if is_real_time else len(self.prefilling) - self.num_real_time_prompts

    @property
    def has_free_slot(self) -> bool:
        """True for a decode worker (a colocated one takes no request of another) that can run one more request."""
        return self._takes_prefilled and len(self.decoding) < self.registered.max_running_requests

    @property
    def has_real_time_slot(self) -> bool:
        return self._takes_prefilled and len(self.decoding_real_time) < self.registered.max_running_requests

    @property
    def num_decoding(self) -> int:
        return len(self.decoding | self.coming)

    @property
    def num_chats(self) -> int:
        return len(self.decoding_real_time | self.coming)

    @property
    def _takes_prefilled(self) -> bool:
        return self.registered.can_decode and not self.registered.can_prefill and not self.is_draining

    @property
    def can_take_over(self) -> bool:
        registered = self.registered
        return registered.can_move and not self.is_draining and self.num_held < registered.max_running_requests

    @property
    def num_held(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def delay(self) -> DecodeDelay:
        return self.load.delay if self.load is not None else DecodeDelay()

    @property
    def num_longer(self) -> int:
        """Return how many contexts here, prompts on their way included, delay decodes of usual length."""
        coming = sum(prefill.num_tokens > self.delay.even_len for prefill in self.prefilling.values())
        return max(self.delay.num_longer, coming)

    @property
    def longest_len(self) -> int:
        coming = max((prefill.num_tokens for prefill in self.prefilling.values()), default=0)
        return max(self.delay.even_len, self.delay.longest_len, coming)

    def is_delayed_by(self, context_len: int) -> bool:
        return self.delay.longer_token_s > 0.0 and context_len > self.longest_len

    def decodes_s(self, context_len: int, num_left: float, *, is_home: bool) -> float:
        """Return what decodes of a request take here, and by how much they delay the others'.

        `is_home`: long contexts go here now, so that only what is longer than all of them delays. Example: contexts
        over 2 000 tokens delay, and here are some of up to 8 000. Another of 8 000 costs nothing here, and at any other
        worker each of its tokens delays a token of every request.
        """
        delay = self.delay
        longer_s = max(context_len - (self.longest_len if is_home else delay.even_len), 0) * delay.longer_token_s
        return num_left * (delay.iteration_s + (1 + self.num_held) * longer_s)

    @property
    def lean(self) -> float:
        return self.load.lean if self.load is not None else 1.0

    @property
    def awaits_batch(self) -> bool:
        return self.pending_batch is not None or self.is_load_stale

    @property
    def takes_any_length(self) -> bool:
        running = self.load.running if self.load is not None else None
        return running is None or running.start == PACKED_FROM

    @property
    def room(self) -> int:
        """Return the longest context that may join what it runs, where slack is packed, beside promised room; none:
        from 0 on."""
        load, registered = self.load, self.registered
        if load is None or not load.num_running:
            return self.tokens_in(registered.num_blocks) - self.num_promised
        if load.running is None:
            return 0
        num_free = self.tokens_in(load.num_free_blocks - load.num_candidate_blocks)
        return min(load.running.stop, num_free) - self.num_promised

    def tokens_in(self, num_blocks: int) -> int:
        """Return the longest context that fits so many blocks, beside those of its states; none from 0 on."""
        return (num_blocks - self.registered.state_blocks) * self.registered.block_size

    @property
    def num_blocks_used(self) -> int:
        return self.registered.num_blocks - self.load.num_free_blocks if self.load is not None else 0


RankT = TypeVar("RankT", float, int, tuple[int, int], tuple[float, int], tuple[int, float, int], tuple[float, int, int])

_MIN_STALE = 32  # fewer stale entries are not worth a rebuild


class Ranked(NamedTuple, Generic[RankT]):
    """An entry of a ranking; entries compare by rank, then name."""

    rank: RankT
    name: str


class Ranking(Generic[RankT]):
    """Each name has at most one rank. The first is found at once, a rank is changed in logarithmic time.

    A binary heap: a rank that is replaced leaves a stale entry, which is dropped when it comes to the top, or with all
    others as soon as more than half of the heap is stale.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, RankT] = {}
        self._heap: list[Ranked[RankT]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def put(self, name: str, rank: RankT) -> None:
        if self._ranks.get(name) == rank:
            return
        self._ranks[name] = rank
        heapq.heappush(self._heap, Ranked(rank, name))
        if len(self._heap) > 2 * len(self._ranks) + _MIN_STALE:
            self._heap = [Ranked(rank, name) for name, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def discard(self, name: str) -> None:
        self._ranks.pop(name, None)

    def first(self) -> Ranked[RankT] | None:
        heap, ranks = self._heap, self._ranks
        while heap and ranks.get(heap[0].name) != heap[0].rank:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def in_order(self) -> Generator[str, None, None]:
        passed = []
        try:
            while (first := self.first()) is not None:
                self.discard(first.name)
                passed.append(first)
                yield first.name
        finally:
            for rank, name in passed:
                self.put(name, rank)


class PooledRecord(NamedTuple):
    """A request that waits in a pool."""

    num_blocks: int
    since_s: float
    is_real_time: bool = False
    late_at_s: float = math.inf  # when the next token of a chat is late


@dataclass(slots=True)
class PoolRecord:
    """One registered pool."""

    name: str
    epoch: int  # counts registrations: a restarted pool has another one
    num_blocks: int
    layout_digest: str = ""
    num_blocks_used: int = 0
    num_blocks_kept: int = 0
    num_reserved: int = 0  # requests that wait for free blocks there, after their prefill
    lengths: LengthTree = field(default_factory=LengthTree)  # of those that wait for a batch
    large_requests: dict[RequestId, tuple[int, float]] = field(
        default_factory=dict
    )  # pooled requests larger than a busy worker's share: blocks, since when
    pooled: OrderedDict[RequestId, PooledRecord] = field(
        default_factory=OrderedDict
    )  # requests that wait there for a batch or are on their way, as the router knows them; the oldest first
    pooled_real_time: dict[RequestId, int] = field(default_factory=dict)  # the real-time ones of these: blocks
    late: Ranking[float] = field(default_factory=Ranking)  # those by when their next token is late

    def add_pooled(self, request_id: RequestId, record: PooledRecord) -> None:
        self.pooled[request_id] = record
        if record.is_real_time:
            self.pooled_real_time[request_id] = record.num_blocks
        if math.isfinite(record.late_at_s):
            self.late.put(request_id, record.late_at_s)

    def remove_pooled(self, request_id: RequestId) -> bool:
        self.pooled_real_time.pop(request_id, None)
        self.late.discard(request_id)
        self.large_requests.pop(request_id, None)
        return self.pooled.pop(request_id, None) is not None

    @property
    def num_pooled(self) -> int:
        return len(self.pooled)

    @property
    def oldest_s(self) -> float:
        return next(iter(self.pooled.values())).since_s

    @property
    def late_at_s(self) -> float:
        first = self.late.first()
        return first.rank if first is not None else math.inf

    @property
    def oldest_blocks(self) -> int:
        return next(iter(self.pooled.values())).num_blocks
