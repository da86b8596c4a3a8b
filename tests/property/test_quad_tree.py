"""Random histories of the quad-tree against a dictionary of requests: every node's counts, members and waiting time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core.ids import RequestId
from kvpool.ordered_entries import NO_SIZE, Entry, OrderedEntries
from kvpool.quad_tree import NEVER, QuadTree
from kvpool.state import PooledRequest
from tests.support.marks import many

BLOCK_SIZE, MAX_LEN = 4, 60  # 16 leaves; the last one ends beyond the maximum
LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from((1, 4, 5, 33, 59, 60, 61, 1000)))
BLOCKS = st.integers(1, 6)
ARRIVALS = st.integers(0, 5).map(float)
BATCHES = st.lists(st.integers(0, 40), max_size=5)
# Which request, whether it goes, its (new) length and blocks, its arrival.
STEP = st.tuples(st.integers(0, 25), st.booleans(), LENGTHS, BLOCKS, ARRIVALS)
Step = tuple[int, bool, int, int, float]
STEPS = st.one_of(st.lists(STEP, max_size=10), st.lists(STEP, min_size=40, max_size=80))


def leaf_number(context_len: int) -> int:
    return (min(context_len, MAX_LEN) - 1) // BLOCK_SIZE


def ranges_around(leaf: int) -> list[tuple[int, int]]:
    return [(leaf - leaf % width, width) for width in (1, 4, 16)]


class Model:
    """Compute what the tree must know from all requests, each time."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, PooledRequest] = {}
        self.since_s: dict[int, float] = {}  # leaves that are occupied
        self.served_s: dict[tuple[int, int], float] = {}  # ranges that are, by first leaf and width

    def occupy(self, leaf: int, now: float) -> None:
        self.since_s.setdefault(leaf, now)
        for around in ranges_around(leaf):
            self.served_s.setdefault(around, now)

    def leave(self, leaf: int) -> None:
        if not self.members(range(leaf, leaf + 1)):
            del self.since_s[leaf]
        for first, width in ranges_around(leaf):
            if not self.members(range(first, first + width)):
                del self.served_s[first, width]

    def serve(self, leaves: list[int], now: float) -> None:
        self.since_s |= dict.fromkeys(leaves, now)
        for leaf in leaves:
            self.served_s |= dict.fromkeys(ranges_around(leaf), now)

    def members(self, leaves: range) -> list[PooledRequest]:
        return [one for one in self.requests.values() if leaf_number(one.context_len) in leaves]


def assert_tree_is(tree: QuadTree, model: Model) -> None:
    node, width = 0, 16
    while width:
        for first in range(0, 16, width):
            members = model.members(range(first, first + width))
            assert tree.num_requests[node] == len(members)
            assert tree.num_blocks[node] == sum(one.num_blocks for one in members)
            assert tree.smallest[node] == min((one.num_blocks for one in members), default=NO_SIZE)
            times = [model.since_s[leaf] for leaf in range(first, first + width) if leaf in model.since_s]
            assert tree.waiting_since_s[node] == min(times, default=NEVER)
            assert not members or tree.served_s[node] == model.served_s[first, width]
            if width == 1 and members:
                order = sorted((one.arrival_s, one.request_id) for one in members)
                assert [(entry[0], entry[2]) for entry in tree.oldest_first(node)] == order
            node += 1
        width //= 4
    assert len(tree) == len(model.requests)


def check_every_node(steps: list[Step], batches: list[int]) -> None:
    tree, model = QuadTree(block_size=BLOCK_SIZE, max_context_len=MAX_LEN), Model()
    for number, (which, goes, context_len, num_blocks, arrival_s) in enumerate(steps):
        request_id = RequestId(f"r{which}")
        old = model.requests.get(request_id)
        new = PooledRequest(request_id, context_len, num_blocks, arrival_s, None)
        if old is None:
            tree.insert(new, float(number))
            model.requests[request_id] = new
            model.occupy(leaf_number(context_len), float(number))
        elif goes:
            assert tree.remove(request_id) == model.requests.pop(request_id)
            model.leave(leaf_number(old.context_len))
        else:
            tree.remove(request_id)
            del model.requests[request_id]
            model.leave(leaf_number(old.context_len))
            tree.insert(new, float(number))
            model.requests[request_id] = new
            model.occupy(leaf_number(context_len), float(number))
        if number in batches:
            leaves = sorted(model.since_s)[::2]
            tree.mark_served([tree.first_leaf + leaf for leaf in leaves], float(number))
            model.serve(leaves, float(number))
        assert_tree_is(tree, model)
    for context_len in (1, 4, 5, 60, 61, 10**9):
        assert tree.leaf_of(context_len) == tree.first_leaf + leaf_number(context_len)


@settings(max_examples=30)
@given(steps=STEPS, batches=BATCHES)
def test_every_node_knows_what_lies_in_its_range(steps: list[Step], batches: list[int]) -> None:
    check_every_node(steps, batches)


@pytest.mark.slow
@settings(max_examples=many(1000))
@given(steps=STEPS, batches=BATCHES)
def test_every_node_knows_what_lies_in_its_range_in_many_histories(steps: list[Step], batches: list[int]) -> None:
    check_every_node(steps, batches)


@given(block_size=st.integers(1, 20), max_len=st.integers(1, 700))
def test_any_block_size_and_length_has_leaves_for_all(block_size: int, max_len: int) -> None:
    tree = QuadTree(block_size=block_size, max_context_len=max_len)
    leaves = [tree.leaf_of(length) for length in range(1, max_len + 2)]
    assert leaves[0] == tree.first_leaf
    assert leaves[-1] == leaves[-2] < len(tree.num_requests)  # the last length is the first over the maximum
    starts = [length for length in range(1, max_len) if leaves[length] != leaves[length - 1]]
    assert starts == list(range(block_size, max_len, block_size))


ENTRY = st.tuples(st.integers(0, 9).map(float), st.integers(1, 9))
ENTRIES = st.one_of(st.lists(ENTRY, max_size=10), st.lists(ENTRY, min_size=150, max_size=300))


@settings(max_examples=30)
@given(sizes=ENTRIES, seed=st.integers(0, 10**6), num_removals=st.integers(0, 300), limit=st.integers(0, 200))
def test_entries_keep_their_order_and_find_what_fits(
    sizes: list[tuple[float, int]], seed: int, num_removals: int, limit: int
) -> None:
    entries, model = OrderedEntries(), list[Entry]()
    for number, (arrival_s, size) in enumerate(sizes):
        if limit % 2 and number % 100:
            size = 9  # small ones are rare: whole chunks do not fit, and one behind them does
        entry = (arrival_s, arrival_s, RequestId(f"r{number}"), size)
        entries.add(entry)
        model.append(entry)
    model.sort()
    rng = random.Random(seed)
    for _ in range(min(num_removals, len(model))):
        entries.remove(model.pop(rng.randrange(len(model))))
        assert entries.smallest == min((entry[3] for entry in model), default=NO_SIZE)
    assert list(entries) == model
    assert list(entries.up_to(limit % 10)) == [entry for entry in model if entry[3] <= limit % 10]
    first_fit, left, blocks_left = list[Entry](), list[int](), limit
    for entry in model:
        if entry[3] <= blocks_left and len(first_fit) < 20:
            first_fit.append(entry)
            blocks_left -= entry[3]
        else:
            left.append(entry[3])
    found = entries.first_fit(limit, 20)
    assert found.entries == first_fit
    if len(first_fit) < 20:
        assert found.smallest_left == min(left, default=NO_SIZE)
