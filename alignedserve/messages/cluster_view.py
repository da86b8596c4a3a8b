"""What a cluster does at this moment, for people who look on: parts of reports, by which nothing is decided."""

from bisect import bisect_left
from typing import Annotated, Any

import msgspec

from alignedserve.core.ids import BatchId
from alignedserve.messages.fields import Count, Seconds, Share, Text

MAX_ADAPTERS = 64  # of LoRA that are told of by name
MAX_RANGES = 64  # of a tree in one report: it is told as coarsely as that takes
# Upper edges of the histograms of times, those of vLLM's requests; a last bucket has none.
TIME_EDGES_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
                960.0, 1920.0, 7680.0)  # fmt: skip
_NUM_TIMES = len(TIME_EDGES_S) + 1

TimeCounts = Annotated[tuple[Count, ...], msgspec.Meta(min_length=_NUM_TIMES, max_length=_NUM_TIMES)]


class TimeSpread(msgspec.Struct, frozen=True, array_like=True):
    """Histogram of a time that every request takes."""

    counts: TimeCounts = (0,) * _NUM_TIMES  # requests by time, one bucket for each edge and the last
    sum_s: Seconds = 0.0

    def with_time(self, time_s: float) -> "TimeSpread":
        """Return it with one more request; a time below 0, between clocks of two hosts, counts as 0."""
        time_s = max(time_s, 0.0)
        bucket = bisect_left(TIME_EDGES_S, time_s)
        counts = (*self.counts[:bucket], self.counts[bucket] + 1, *self.counts[bucket + 1 :])
        return TimeSpread(counts, self.sum_s + time_s)


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """Where the time of requests goes, by vLLM's parts; each counted once, whatever is repeated after losses."""

    queue: TimeSpread = TimeSpread()  # from arrival until a worker has the prompt
    prefill: TimeSpread = TimeSpread()  # from there until its first token
    inference: TimeSpread = TimeSpread()  # from there until its last token


class BatchShape(msgspec.Struct, frozen=True, array_like=True):
    """The requests of one iteration, and their context lengths."""

    num_requests: Count = 0
    shortest: Count = 0
    mean_len: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    longest: Count = 0


class WorkerStatus(msgspec.Struct, frozen=True, array_like=True):
    """One worker, as the router knows it."""

    worker: Text
    node: Text = ""  # where it runs; empty on a cluster of one host
    can_prefill: bool = True
    can_decode: bool = True
    is_elastic: bool = False  # its lean says for what it has its time
    is_draining: bool = False  # it gets nothing new
    lean: Share = 1.0
    num_waiting: Count = 0  # requests that it holds and that are not in its iterations
    num_running: Count = 0
    num_places: Count = 0  # requests in its iterations at most
    num_blocks: Count = 0
    num_blocks_used: Count = 0
    num_prompt_tokens: Count = 0  # computed since it registered, like the next three
    num_tokens: Count = 0  # generated
    wall_s: Seconds = 0.0  # of its iterations and of what lies between them
    compute_s: Seconds = 0.0  # of that, the engine's
    batch: BatchShape = BatchShape()  # of its last iteration, while it has requests


class TierLoad(msgspec.Struct, frozen=True, array_like=True):
    """Requests of one class by what happens to them."""

    num_queued: Count = 0
    num_prefilling: Count = 0
    num_pooled: Count = 0
    num_decoding: Count = 0
    oldest_queued_s: Seconds = 0.0  # for how long the oldest of those queued has waited; 0: there is none


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """The requests of one LoRA adapter."""

    name: Text
    num_running: Count = 0  # in prefill or decode, or between them in a pool
    num_waiting: Count = 0  # queued


class AdapterLoads(msgspec.Struct, frozen=True, array_like=True):
    """LoRA adapters in use, the busiest first, up to a limit."""

    max_adapters: Count = 0  # in the memory of each worker; 0: adapters are off
    loads: Annotated[tuple[AdapterLoad, ...], msgspec.Meta(max_length=MAX_ADAPTERS)] = ()


class LengthLeaf(msgspec.Struct, frozen=True, array_like=True):
    """One range of a tree that is not empty."""

    index: Count  # its place among all ranges of this width
    num_requests: Count
    num_blocks: Count = 0


class FormedBatch(msgspec.Struct, frozen=True, array_like=True):
    """The batch that a pool formed last, and the half-open range of its context lengths."""

    batch_id: BatchId
    worker: Text
    start: Count
    stop: Count
    num_requests: Count
    num_blocks: Count


class LengthTree(msgspec.Struct, frozen=True, array_like=True):
    """A quad-tree over context lengths, cut at the finest level that has no more occupied ranges than may be told."""

    max_len: Count = 0  # tokens that the root covers
    leaf_len: Count = 0  # tokens that each of these ranges covers
    leaves: Annotated[tuple[LengthLeaf, ...], msgspec.Meta(max_length=MAX_RANGES)] = ()  # shortest first
    formed: FormedBatch | None = None  # None: none yet, or nothing is batched by length


class PlacedTree(msgspec.Struct, frozen=True, array_like=True):
    """The tree of one pool; of the router's own requests where no pool holds any."""

    place: Text
    tree: LengthTree


def tree_of(leaves: dict[int, tuple[int, int]], *, leaf_len: int, max_len: int) -> LengthTree:
    """Build the tree of these leaves (index to requests and blocks), coarser by levels until few enough are left."""
    while len(leaves) > MAX_RANGES:
        parents: dict[int, tuple[int, int]] = {}
        for index, (num_requests, num_blocks) in leaves.items():
            requests, blocks = parents.get(index // 4, (0, 0))
            parents[index // 4] = (requests + num_requests, blocks + num_blocks)
        leaves, leaf_len = parents, leaf_len * 4
    return LengthTree(max_len, leaf_len, tuple(LengthLeaf(index, *leaves[index]) for index in sorted(leaves)))


# Upper edges of the histogram of spread (longest context of a batch over its mean); a last bucket has none.
SPREAD_EDGES = (1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)
_NUM_BUCKETS = len(SPREAD_EDGES) + 1

Total = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
TotalSeconds = Annotated[float, msgspec.Meta(ge=0.0)]
SpreadCounts = Annotated[tuple[Total, ...], msgspec.Meta(min_length=_NUM_BUCKETS, max_length=_NUM_BUCKETS)]


class WorkerSpeed(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a worker needs with nothing else to do; 0: it did not measure. Default objectives follow from it."""

    short_prompt_s: Seconds = 0.0  # of 64 tokens: no first token comes sooner
    prompt_s: Seconds = 0.0  # of 1 024 tokens, or half of what its memory holds
    token_s: Seconds = 0.0  # of one request: no gap is shorter
    shared_token_s: Seconds = 0.0  # of four together

    def slower(self, other: "WorkerSpeed") -> "WorkerSpeed":
        """Return the longer of each of the times."""
        return WorkerSpeed(
            max(self.short_prompt_s, other.short_prompt_s),
            max(self.prompt_s, other.prompt_s),
            max(self.token_s, other.token_s),
            max(self.shared_token_s, other.shared_token_s),
        )


class IterationLogTotals(msgspec.Struct, frozen=True, array_like=True):
    """Sums over decode iterations: a worker reports its gain, the router the sum of all.

    The seven parts add up to the wall time, except for unmeasured gaps.
    """

    num_iterations: Total = 0
    num_switch_iterations: Total = 0  # of those, in which two batches mixed
    num_requests: Total = 0  # running requests, counted again in every iteration
    wall_s: TotalSeconds = 0.0  # from the end of one iteration to the end of the next
    nothing_to_do_s: TotalSeconds = 0.0  # first part: no requests
    waiting_for_prefill_s: TotalSeconds = 0.0  # second: requests, none granted to this worker yet
    prefetch_not_ready_s: TotalSeconds = 0.0  # third: granted, not yet loaded
    turnaround_s: TotalSeconds = 0.0  # fourth: deciding, and the way to the computing thread and back
    prepare_s: TotalSeconds = 0.0  # fifth
    forward_s: TotalSeconds = 0.0  # sixth
    sampling_s: TotalSeconds = 0.0  # seventh
    misaligned_s: TotalSeconds = 0.0  # of forward_s: attention that stragglers cost
    sum_of_spreads: TotalSeconds = 0.0
    spread_counts: SpreadCounts = (0,) * _NUM_BUCKETS  # iterations by spread, one bucket for each edge and the last
    num_ahead_iterations: Total = 0  # that were launched before the tokens of the one before were known
    # Where interference is bounded, of iterations in gaps of real-time requests: of their part alone by the cost model,
    # and as they were.
    real_time_alone_s: TotalSeconds = 0.0
    real_time_beside_s: TotalSeconds = 0.0
    sum_of_straggler_shares: TotalSeconds = 0.0  # of each iteration's decode attention, from 0 to 1
    # Iterations that ran within another, whose pass stood still meanwhile; and until it did, added up.
    num_yields: Total = 0
    yielded_s: TotalSeconds = 0.0
    stopping_s: TotalSeconds = 0.0

    @property
    def straggler_share(self) -> float:
        """Return the share of decode attention that stragglers cost, in the mean of iterations."""
        return self.sum_of_straggler_shares / max(self.num_iterations, 1)

    def plus(self, other: "IterationLogTotals") -> "IterationLogTotals":
        """Add both totals."""
        ours, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        sums: dict[str, Any] = {name: ours[name] + theirs[name] for name in ours if name != "spread_counts"}
        pairs = zip(self.spread_counts, other.spread_counts, strict=True)
        return IterationLogTotals(**sums, spread_counts=tuple(mine + yours for mine, yours in pairs))
