"""Density-first search: a batch of requests of similar length, from the range that holds most of them.

From the root of the quad-tree downwards, always into the child with most requests, until a range fits the limits. It
is the batch or, if it holds too few, its beginning: the search climbs and widens to the left siblings and then to the
right ones, leaf by leaf, nearest first, until there are enough. The first leaf that does not fit as a whole gives the
oldest requests that do, and the batch is full. docs/policies/density_first.md has an example.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice

from alignedserve.core.ids import RequestId
from alignedserve.messages.cluster_view import LengthTree
from kvpool.policies.batch_former import AlignedBatch, BatchLimits, LengthRange, batch_of
from kvpool.quad_tree import ROOT, Entry, OrderedEntries, QuadTree, order_entry
from kvpool.state import PooledRequest

DEFAULT_STARVATION_S = 2.0


@dataclass(frozen=True, slots=True)
class DensityFirstConfig:
    """Parameters of the policy."""

    starvation_s: float = DEFAULT_STARVATION_S  # a range that gave nothing to a batch for this long goes first
    block_size: int = 16  # tokens; the smallest range
    max_context_len: int = 65536  # longer ones count as this


class DensityFirstBatchFormer:
    """BatchFormer by AlignedServe's density-first search, with two exceptions that precede density.

    A request about to miss its deadline, the most urgent first, is in the next batch, and the search starts from its
    leaf. Otherwise, if a leaf gave nothing to a batch for `starvation_s`, the search goes down from the widest range
    around the longest waiting one, short of the whole, that gave nothing for so long either.
    """

    is_aligned = True

    def __init__(self, config: DensityFirstConfig) -> None:
        self._starvation_s = config.starvation_s
        self._tree = QuadTree(block_size=config.block_size, max_context_len=config.max_context_len)
        self._deadlines = OrderedEntries()

    def insert(self, pooled: PooledRequest, now: float) -> None:
        self._tree.insert(pooled, now)
        if (entry := _deadline_entry(pooled)) is not None:
            self._deadlines.add(entry)

    def remove(self, request_id: RequestId) -> None:
        pooled = self._tree.remove(request_id)
        if (entry := _deadline_entry(pooled)) is not None:
            self._deadlines.remove(entry)

    def form(self, limits: BatchLimits, now: float) -> AlignedBatch | None:
        tree = self._tree
        if limits.max_requests < 1 or tree.smallest[ROOT] > limits.max_blocks:
            return None
        builder = _BatchBuilder(tree, limits)
        entry = next(self._deadlines.up_to(limits.max_blocks), None)
        urgent = self._tree[entry[2]] if entry is not None and entry[0] <= now else None
        if urgent is not None:
            start = tree.leaf_of(urgent.context_len)
            builder.take_around(urgent, start)
        else:
            start = _densest(tree, limits, self._first_range(limits, now))
            builder.take(start, limits.max_requests)
        builder.widen(start, min(limits.min_requests, limits.max_requests))
        return self._served(builder.chosen, now)

    def join(self, lengths: LengthRange, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """Pass over requests larger than the limit; the first other that does not fit ends the choice.

        In a leaf that the range covers only in part, the oldest `4 * max_requests` are looked at.
        """
        chosen: list[PooledRequest] = []
        blocks_left = limits.max_blocks
        for entry in merge(*self._within(lengths, limits)):
            blocks_left -= entry[3]
            if blocks_left < 0 or len(chosen) == limits.max_requests:
                break
            chosen.append(self._tree[entry[2]])
        return self._served(chosen, now) if chosen else None

    def seen(self) -> LengthTree:
        return self._tree.seen()

    def _first_range(self, limits: BatchLimits, now: float) -> int:
        before_s = now - self._starvation_s
        leaf = self._tree.longest_waiting(before_s, limits.max_blocks)
        return ROOT if leaf is None else self._tree.widest_unserved(leaf, before_s)

    def _within(self, lengths: LengthRange, limits: BatchLimits) -> Iterator[Iterator[Entry]]:
        tree = self._tree
        start, stop = max(lengths.start, 1), lengths.stop
        if start >= stop:
            return
        ends = (tree.leaf_of(start), tree.leaf_of(stop - 1))
        for leaf in tree.occupied_between(start, stop):
            entries = tree.oldest_first(leaf).up_to(limits.max_blocks)
            if leaf in ends:  # may hold other lengths as well
                oldest = islice(entries, 4 * limits.max_requests)
                entries = (entry for entry in oldest if start <= tree[entry[2]].context_len < stop)
            yield entries

    def _served(self, chosen: list[PooledRequest], now: float) -> AlignedBatch:
        batch = batch_of(chosen)
        leaf_of = self._tree.leaf_of
        self._tree.mark_served(sorted({leaf_of(pooled.context_len) for pooled in chosen}), now)
        return batch


def _densest(tree: QuadTree, limits: BatchLimits, node: int) -> int:
    while node < tree.first_leaf:
        if tree.num_blocks[node] <= limits.max_blocks and tree.num_requests[node] <= limits.max_requests:
            break
        children = range(4 * node + 1, 4 * node + 5)
        node = max(
            (child for child in children if tree.smallest[child] <= limits.max_blocks),
            key=tree.num_requests.__getitem__,
        )
    return node


class _BatchBuilder:
    def __init__(self, tree: QuadTree, limits: BatchLimits) -> None:
        self._tree = tree
        self._max_blocks = limits.max_blocks
        self._blocks_left = limits.max_blocks
        self._requests_left = limits.max_requests
        self._is_full = False
        self.chosen: list[PooledRequest] = []

    def take_around(self, pooled: PooledRequest, leaf: int) -> None:
        entries, entry = self._tree.oldest_first(leaf), order_entry(pooled)
        self._choose([entry])
        entries.remove(entry)  # for this search only: it is chosen already
        self._take_from(entries)
        entries.add(entry)

    def take(self, node: int, enough: int, *, is_leftwards: bool = False) -> None:
        if self._is_full or len(self.chosen) >= enough or self._tree.smallest[node] > self._max_blocks:
            return
        if node >= self._tree.first_leaf:
            self._take_from(self._tree.oldest_first(node))
            return
        children = range(4 * node + 1, 4 * node + 5)
        for child in reversed(children) if is_leftwards else children:
            self.take(child, enough, is_leftwards=is_leftwards)

    def widen(self, node: int, enough: int) -> None:
        while node != ROOT and not self._is_full and len(self.chosen) < enough:
            parent = (node - 1) >> 2
            for sibling in range(node - 1, 4 * parent, -1):
                self.take(sibling, enough, is_leftwards=True)
            for sibling in range(node + 1, 4 * parent + 5):
                self.take(sibling, enough)
            node = parent

    def _take_from(self, entries: OrderedEntries) -> None:
        fitting = entries.first_fit(self._blocks_left, self._requests_left)
        self._choose(fitting.entries)
        self._is_full = fitting.smallest_left <= self._max_blocks

    def _choose(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.chosen.append(self._tree[entry[2]])
            self._blocks_left -= entry[3]
        self._requests_left -= len(entries)


def _deadline_entry(pooled: PooledRequest) -> Entry | None:
    if pooled.urgent_at_s is None:
        return None
    return (pooled.urgent_at_s, pooled.arrival_s, pooled.request_id, pooled.num_blocks)
