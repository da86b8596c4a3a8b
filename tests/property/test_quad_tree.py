"""Random histories of the quad-tree against a dictionary of requests: every node's counts, members and waiting time."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core.ids import RequestId
from kvpool.quad_tree import NO_SIZE, Entry, OrderedEntries, QuadTree


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
