"""What a cluster does at this moment, for people who look on: parts of reports, by which nothing is decided."""

from bisect import bisect_left
from typing import Annotated

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
    """LoRA adapters that requests have, those with most requests first, as many as may be told."""

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
