"""Quad-tree over context lengths: how many requests, and how many blocks, lie in which range.

Every node covers a range of lengths, split in four down to one block. Nodes are numbered level by level, as in a heap:
the root is 0, the children of n are 4n+1 to 4n+4, the leaves come last, shortest lengths first. The values of a node
are in flat lists under its number. Lengths over the maximum are counted as the maximum.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter

from alignedserve.core.ids import RequestId
from alignedserve.messages.cluster_view import MAX_RANGES, LengthLeaf, LengthTree
from kvpool.state import PooledRequest

# (time it is ordered by, arrival, id, blocks); the id is unique, so the blocks never decide the order.
Entry = tuple[float, float, RequestId, int]

NO_SIZE = 1 << 62  # smallest size of an empty list: fits no limit
_MAX_CHUNK = 64
_MIN_CHUNK = 8  # smaller ones are merged with their neighbour
_blocks_of = itemgetter(3)


@dataclass(frozen=True, slots=True)
class FitResult:
    """Entries that fit together, in order, and the size of the smallest one left."""

    entries: list[Entry]
    smallest_left: int  # NO_SIZE: none was left


class OrderedEntries:
    """Entries in ascending order, in chunks of a few dozen; a search for what fits skips whole chunks by their
    `smallest`."""

    __slots__ = ("_chunks", "_lasts", "_smallest", "smallest")

    def __init__(self) -> None:
        self._chunks: list[list[Entry]] = []
        self._lasts: list[Entry] = []  # per chunk its last entry
        self._smallest: list[int] = []  # per chunk the size of its smallest entry
        self.smallest = NO_SIZE

    def __iter__(self) -> Iterator[Entry]:
        for chunk in self._chunks:
            yield from chunk

    def add(self, entry: Entry) -> None:
        size = entry[3]
        if size < self.smallest:
            self.smallest = size
        if not self._chunks:
            self._chunks, self._lasts, self._smallest = [[entry]], [entry], [size]
            return
        index = min(bisect_left(self._lasts, entry), len(self._lasts) - 1)
        chunk = self._chunks[index]
        insort(chunk, entry)
        self._lasts[index] = chunk[-1]
        if size < self._smallest[index]:
            self._smallest[index] = size
        if len(chunk) > _MAX_CHUNK:
            half = len(chunk) // 2
            self._replace(index, 1, [chunk[:half], chunk[half:]])

    def remove(self, entry: Entry) -> None:
        index = bisect_left(self._lasts, entry)
        chunk = self._chunks[index]
        position = bisect_left(chunk, entry)
        del chunk[position]
        if not chunk or (len(chunk) < _MIN_CHUNK and len(self._chunks) > 1):
            self._shrink(index)
        else:
            self._lasts[index] = chunk[-1]
            if entry[3] == self._smallest[index] and entry[3] not in map(_blocks_of, chunk):
                self._smallest[index] = min(map(_blocks_of, chunk))
        if entry[3] == self.smallest and entry[3] not in self._smallest:
            self.smallest = min(self._smallest, default=NO_SIZE)

    def _shrink(self, index: int) -> None:
        first = max(0, min(index, len(self._chunks) - 2))
        merged = [entry for chunk in self._chunks[first : first + 2] for entry in chunk]
        if len(merged) > _MAX_CHUNK:
            self._replace(index, 1, [self._chunks[index]])
        else:
            self._replace(first, 2, [merged])

    def _replace(self, index: int, count: int, chunks: list[list[Entry]]) -> None:
        chunks = [chunk for chunk in chunks if chunk]
        self._chunks[index : index + count] = chunks
        self._lasts[index : index + count] = [chunk[-1] for chunk in chunks]
        self._smallest[index : index + count] = [min(map(_blocks_of, chunk)) for chunk in chunks]

    def up_to(self, max_blocks: int) -> Iterator[Entry]:
        for chunk, smallest in zip(self._chunks, self._smallest, strict=True):
            if smallest <= max_blocks:
                yield from (entry for entry in chunk if entry[3] <= max_blocks)

    def first_fit(self, max_blocks: int, max_requests: int) -> FitResult:
        entries: list[Entry] = []
        smallest_left = NO_SIZE
        for index, smallest in enumerate(self._smallest):
            if self.smallest > max_blocks:  # nothing that follows fits
                return FitResult(entries, min(smallest_left, *self._smallest[index:]))
            if smallest > max_blocks:
                smallest_left = min(smallest_left, smallest)
                continue
            for entry in self._chunks[index]:
                size = entry[3]
                if size > max_blocks:
                    smallest_left = min(smallest_left, size)
                elif len(entries) == max_requests:
                    return FitResult(entries, min(smallest_left, size))
                else:
                    entries.append(entry)
                    max_blocks -= size
        return FitResult(entries, smallest_left)


ROOT = 0
NEVER = float("inf")  # an empty range does not wait


class QuadTree:
    """Pooled requests by context length; inserting and removing touch one node per level.

    The lists hold one number per node. Policies read them to search the tree; only the tree writes them.
    """

    def __init__(self, *, block_size: int = 16, max_context_len: int = 65536) -> None:
        self._block_size = block_size
        self._max_context_len = max_context_len
        num_leaves = 1
        while num_leaves * block_size < max_context_len:
            num_leaves *= 4
        self.first_leaf = (num_leaves - 1) // 3
        num_nodes = self.first_leaf + num_leaves
        self.num_requests = [0] * num_nodes
        self.num_blocks = [0] * num_nodes
        self.smallest = [NO_SIZE] * num_nodes  # blocks of the smallest request
        # When the leaf last gave requests to a batch, or was first occupied after that; in other nodes the earliest
        # of their leaves.
        self.waiting_since_s = [NEVER] * num_nodes
        # When the node's range last gave requests to a batch, or was first occupied after that.
        self.served_s = [NEVER] * num_nodes
        self._entries: list[OrderedEntries | None] = [None] * num_leaves
        self._paths: list[tuple[int, ...] | None] = [None] * num_leaves  # built on first use
        self._members: dict[RequestId, PooledRequest] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, request_id: RequestId) -> PooledRequest:
        return self._members[request_id]

    def leaf_of(self, context_len: int) -> int:
        return self.first_leaf + (min(context_len, self._max_context_len) - 1) // self._block_size

    def oldest_first(self, leaf: int) -> OrderedEntries:
        entries = self._entries[leaf - self.first_leaf]
        assert entries is not None, "an empty leaf"
        return entries

    def insert(self, pooled: PooledRequest, now: float) -> None:
        assert pooled.request_id not in self._members, "a request pooled twice"
        assert pooled.context_len > 0, "a request without context"
        self._members[pooled.request_id] = pooled
        leaf = self.leaf_of(pooled.context_len)
        self._count(self._path(leaf), 1, pooled.num_blocks)
        for node in self._path(leaf):
            if self.num_requests[node] > 1:
                break  # so have all nodes above
            self.served_s[node] = now
        self._put_into(leaf, pooled, now)

    def remove(self, request_id: RequestId) -> PooledRequest:
        pooled = self._members.pop(request_id)
        leaf = self.leaf_of(pooled.context_len)
        self._count(self._path(leaf), -1, -pooled.num_blocks)
        self._take_from(leaf, pooled)
        return pooled

    def mark_served(self, leaves: list[int], now: float) -> None:
        for leaf in leaves:
            self.waiting_since_s[leaf] = self.served_s[leaf] = now
        nodes = leaves
        while nodes and nodes[0] != ROOT:
            nodes = list(dict.fromkeys((node - 1) >> 2 for node in nodes))
            for node in nodes:
                self.waiting_since_s[node] = min(self.waiting_since_s[4 * node + 1 : 4 * node + 5])
                self.served_s[node] = now

    def _count(self, path: tuple[int, ...], num_requests: int, num_blocks: int) -> None:
        requests_of, blocks_of = self.num_requests, self.num_blocks
        for node in path:
            requests_of[node] += num_requests
            blocks_of[node] += num_blocks

    def _put_into(self, leaf: int, pooled: PooledRequest, waiting_since_s: float) -> None:
        entries = self._entries[leaf - self.first_leaf]
        if entries is None:
            entries = self._entries[leaf - self.first_leaf] = OrderedEntries()
        else:
            waiting_since_s = NEVER  # the leaf keeps its own time
        entries.add(order_entry(pooled))
        num_blocks = pooled.num_blocks
        for node in self._path(leaf):
            if self.smallest[node] <= num_blocks and self.waiting_since_s[node] <= waiting_since_s:
                return  # so it is in all nodes above
            self.smallest[node] = min(self.smallest[node], num_blocks)
            self.waiting_since_s[node] = min(self.waiting_since_s[node], waiting_since_s)

    def _take_from(self, leaf: int, pooled: PooledRequest) -> None:
        entries = self.oldest_first(leaf)
        entries.remove(order_entry(pooled))
        if entries.smallest == self.smallest[leaf]:
            return  # nothing above changes
        self.smallest[leaf] = entries.smallest
        if entries.smallest == NO_SIZE:
            self._entries[leaf - self.first_leaf] = None
            self.waiting_since_s[leaf] = NEVER
        for node in self._path(leaf)[1:]:
            children = slice(4 * node + 1, 4 * node + 5)
            smallest, since_s = min(self.smallest[children]), min(self.waiting_since_s[children])
            if smallest == self.smallest[node] and since_s == self.waiting_since_s[node]:
                return
            self.smallest[node], self.waiting_since_s[node] = smallest, since_s

    def _path(self, leaf: int) -> tuple[int, ...]:
        path = self._paths[leaf - self.first_leaf]
        if path is None:
            nodes = [leaf]
            while nodes[-1] != ROOT:
                nodes.append((nodes[-1] - 1) >> 2)
            path = self._paths[leaf - self.first_leaf] = tuple(nodes)
        return path

    def longest_waiting(self, before_s: float, max_blocks: int) -> int | None:
        """Return the leaf waiting longest, since `before_s` or earlier, with a request within the limit; ties: left."""
        candidates = [(self.waiting_since_s[ROOT], 0, ROOT, len(self._entries))]  # since, first leaf, node, leaves
        while candidates:
            since_s, first, node, width = heappop(candidates)
            if since_s > before_s:
                return None
            if self.smallest[node] > max_blocks:
                continue
            if node >= self.first_leaf:
                return node
            width >>= 2
            for child in range(4 * node + 1, 4 * node + 5):
                heappush(candidates, (self.waiting_since_s[child], first, child, width))
                first += width
        return None

    def widest_unserved(self, leaf: int, before_s: float) -> int:
        """Return the widest range around a leaf, less than the whole, that no batch has served since `before_s`."""
        node = leaf
        while (parent := (node - 1) >> 2) > ROOT and self.served_s[parent] <= before_s:
            node = parent
        return node

    def occupied_between(self, start: int, stop: int) -> Iterator[int]:
        for leaf in range(self.leaf_of(start), self.leaf_of(stop - 1) + 1):
            if self.num_requests[leaf]:
                yield leaf

    def seen(self) -> LengthTree:
        nodes, first, num_ranges = [ROOT] if self._members else [], ROOT, 1
        while nodes and first < self.first_leaf:
            children = [child for node in nodes for child in self._occupied_children(node)]
            if len(children) > MAX_RANGES:
                break
            nodes, first, num_ranges = children, 4 * first + 1, 4 * num_ranges
        span = len(self._entries) * self._block_size
        leaves = [LengthLeaf(node - first, self.num_requests[node], self.num_blocks[node]) for node in nodes]
        return LengthTree(span, span // num_ranges, tuple(leaves))

    def _occupied_children(self, node: int) -> list[int]:
        return [child for child in range(4 * node + 1, 4 * node + 5) if self.num_requests[child]]


def order_entry(pooled: PooledRequest) -> Entry:
    return (pooled.arrival_s, pooled.arrival_s, pooled.request_id, pooled.num_blocks)
