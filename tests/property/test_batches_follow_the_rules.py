"""Density-first search against a plain reading of its rules over a dictionary, and what holds for every batch."""

import random
from collections.abc import Iterable
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core.ids import RequestId
from kvpool.policies.batch_former import AlignedBatch, BatchLimits, LengthRange, batch_of
from kvpool.policies.density_first import DensityFirstBatchFormer, DensityFirstConfig
from kvpool.state import PooledRequest
from tests.support.marks import many

NUM_LEAVES, BLOCK_SIZE, STARVATION_S = 16, 4, 2.0
WIDTHS = (1, 4, 16)
MAX_LEN = NUM_LEAVES * BLOCK_SIZE
CONFIG = DensityFirstConfig(starvation_s=STARVATION_S, block_size=BLOCK_SIZE, max_context_len=MAX_LEN)

LIMITS = st.builds(BatchLimits, st.integers(0, 30), st.integers(0, 12), st.integers(1, 12))
ALL_LIMITS = st.lists(LIMITS, min_size=1, max_size=6)
SEEDS = st.integers(0, 10**9)


def leaf_of(pooled: PooledRequest) -> int:
    return (min(pooled.context_len, MAX_LEN) - 1) // BLOCK_SIZE


def age(pooled: PooledRequest) -> tuple[float, RequestId]:
    return (pooled.arrival_s, pooled.request_id)


class Model:
    """The rules, read off the page; slow and without any index."""

    def __init__(self) -> None:
        self.pool: dict[RequestId, PooledRequest] = {}
        self.served_s: dict[tuple[int, int], float] = {}  # by first leaf and width, of every range that is occupied

    @property
    def since_s(self) -> dict[int, float]:
        """Return the times of the leaves alone."""
        return {first: since_s for (first, width), since_s in self.served_s.items() if width == 1}

    def insert(self, pooled: PooledRequest, now: float) -> None:
        self.pool[pooled.request_id] = pooled
        for node in ranges_around(leaf_of(pooled)):
            self.served_s.setdefault(node, now)

    def remove(self, request_id: RequestId) -> None:
        for node in ranges_around(leaf_of(self.pool.pop(request_id))):
            if not self.within(*node):
                del self.served_s[node]

    def within(self, first: int, width: int) -> list[PooledRequest]:
        return [one for one in self.pool.values() if first <= leaf_of(one) < first + width]

    def form(self, limits: BatchLimits, now: float) -> AlignedBatch | None:
        eligible = [one for one in self.pool.values() if one.num_blocks <= limits.max_blocks]
        if not eligible or not limits.max_requests:
            return None
        urgent = [one for one in eligible if one.urgent_at_s is not None and one.urgent_at_s <= now]
        before_s, since_s = now - STARVATION_S, self.since_s
        starving = [leaf for leaf in map(leaf_of, eligible) if since_s[leaf] <= before_s]
        chosen: list[PooledRequest] = []
        if urgent:
            chosen = [min(urgent, key=lambda one: (one.urgent_at_s, *age(one)))]
            start = (leaf_of(chosen[0]), 1)
        elif starving:
            first = min(starving, key=lambda leaf: (since_s[leaf], leaf))
            unserved = [node for node in ranges_around(first)[:-1] if self.served_s[node] <= before_s]
            start = self.densest(limits, *unserved[-1])
        else:
            start = self.densest(limits)
        self._fill(chosen, start, limits)
        return self._served(chosen, now)

    def densest(self, limits: BatchLimits, first: int = 0, width: int = NUM_LEAVES) -> tuple[int, int]:
        while width > 1 and not fits(self.within(first, width), limits):
            width //= 4
            starts = [first + number * width for number in range(4)]
            eligible = [start for start in starts if smallest(self.within(start, width)) <= limits.max_blocks]
            first = max(eligible, key=lambda start: (len(self.within(start, width)), -start))
        return first, width

    def _fill(self, chosen: list[PooledRequest], start: tuple[int, int], limits: BatchLimits) -> None:
        enough = min(limits.min_requests, limits.max_requests)
        for leaf in nearest_first(*start):
            is_start = start[0] <= leaf < start[0] + start[1]
            if len(chosen) >= (limits.max_requests if is_start else enough):
                if is_start:
                    continue
                return
            left_behind = [one for one in sorted(self.within(leaf, 1), key=age) if one not in chosen]
            for one in tuple(left_behind):
                if fits([*chosen, one], limits):
                    chosen.append(one)
                    left_behind.remove(one)
            if any(one.num_blocks <= limits.max_blocks for one in left_behind):
                return

    def join(self, lengths: LengthRange, limits: BatchLimits, now: float) -> AlignedBatch | None:
        chosen: list[PooledRequest] = []
        num_seen: dict[int, int] = {}
        for one in sorted(self.pool.values(), key=age):
            if one.num_blocks > limits.max_blocks:
                continue
            leaf = leaf_of(one)
            num_seen[leaf] = num_seen.get(leaf, 0) + 1
            ends = {(min(length, MAX_LEN) - 1) // BLOCK_SIZE for length in (max(lengths.start, 1), lengths.stop - 1)}
            is_looked_at = leaf not in ends or num_seen[leaf] <= 4 * limits.max_requests
            if not lengths.start <= one.context_len < lengths.stop or not is_looked_at:
                continue
            if not fits([*chosen, one], limits):
                break
            chosen.append(one)
        return self._served(chosen, now) if chosen else None

    def _served(self, chosen: list[PooledRequest], now: float) -> AlignedBatch:
        self.note_served(map(leaf_of, chosen), now)
        return batch_of(chosen)

    def note_served(self, leaves: Iterable[int], now: float) -> None:
        self.served_s |= dict.fromkeys(chain.from_iterable(map(ranges_around, leaves)), now)


def ranges_around(leaf: int) -> list[tuple[int, int]]:
    """Return the nodes that this leaf lies in, the narrowest first."""
    return [(leaf - leaf % width, width) for width in WIDTHS]


def nearest_first(first: int, width: int) -> list[int]:
    """Return the leaves of a node, then at each level those left and those right of it under the same parent."""
    leaves = list(range(first, first + width))
    while width < NUM_LEAVES:
        parent = first - first % (4 * width)
        leaves += range(first - 1, parent - 1, -1)
        leaves += range(first + width, parent + 4 * width)
        first, width = parent, 4 * width
    return leaves


def fits(requests: list[PooledRequest], limits: BatchLimits) -> bool:
    return len(requests) <= limits.max_requests and sum(one.num_blocks for one in requests) <= limits.max_blocks


def smallest(requests: list[PooledRequest]) -> int:
    return min((one.num_blocks for one in requests), default=10**9)


def random_request(rng: random.Random, number: int, now: float) -> PooledRequest:
    context_len = rng.choice((rng.randint(1, 80), rng.randint(1, 12), 30))
    urgent_at_s = now + rng.uniform(-1.0, 5.0) if rng.random() < 0.1 else None
    return PooledRequest(RequestId(f"r{number}"), context_len, rng.randint(1, 9), float(rng.randint(0, 9)), urgent_at_s)


def assert_sound(batch: AlignedBatch, pool: dict[RequestId, PooledRequest], limits: BatchLimits) -> None:
    """Check the rules of every batch, whichever request came first."""
    members = [pool[request_id] for request_id in batch.request_ids]
    assert members
    assert len(set(batch.request_ids)) == len(members)
    assert fits(members, limits)
    assert batch == batch_of(members)
    left = [one for one in pool.values() if one not in members and one.num_blocks <= limits.max_blocks]
    ends = (leaf_of(members[0]), leaf_of(members[-1]))
    # No gap: what lies between the ends was taken, but for one leaf at an end.
    gaps = {leaf_of(one) for one in left if ends[0] <= leaf_of(one) <= ends[1]}
    assert not gaps or (len(gaps) == 1 and gaps <= set(ends))
    # Enough, or the pool has no more, or full: in the leaf where it ended something did not fit any more.
    if len(members) < min(limits.min_requests, limits.max_requests) and left:
        blocks_left = limits.max_blocks - batch.num_blocks
        assert any(one.num_blocks > blocks_left for one in left)


def follow(seed: int, all_limits: list[BatchLimits]) -> None:
    rng = random.Random(seed)
    former, model, now = DensityFirstBatchFormer(CONFIG), Model(), 0.0
    for number in range(60):
        now += rng.choice((0.0, 0.05, 0.3))
        for turn in range(rng.randint(0, 3)):
            one = random_request(rng, 10 * number + turn, now)
            former.insert(one, now)
            model.insert(one, now)
        limits = rng.choice(all_limits)
        if rng.random() < 0.2:
            lengths = LengthRange(rng.randint(-3, 60), rng.randint(1, 90))
            batch = former.join(lengths, limits, now)
            assert batch == model.join(lengths, limits, now)
        else:
            batch = former.form(limits, now)
            assert batch == model.form(limits, now)
            if batch is not None:
                assert_sound(batch, model.pool, limits)
        if batch is not None and rng.random() < 0.7:
            for request_id in batch.request_ids:
                former.remove(request_id)
                model.remove(request_id)


@settings(max_examples=60)
@given(seed=SEEDS, all_limits=ALL_LIMITS)
def test_every_batch_is_the_one_of_the_rules(seed: int, all_limits: list[BatchLimits]) -> None:
    follow(seed, all_limits)


@pytest.mark.slow
@settings(max_examples=many(1000))
@given(seed=SEEDS, all_limits=ALL_LIMITS)
def test_every_batch_is_the_one_of_the_rules_in_many_histories(seed: int, all_limits: list[BatchLimits]) -> None:
    follow(seed, all_limits)


@settings(max_examples=15)
@given(seed=SEEDS, max_blocks=st.integers(9, 20), max_requests=st.integers(1, 6))
def test_no_request_waits_for_ever_beside_a_crowd(seed: int, max_blocks: int, max_requests: int) -> None:
    """A batch every 0.25 s, and new ones come faster than they go: who waits is in a batch within a bound."""
    rng = random.Random(seed)
    limits, period_s = BatchLimits(max_blocks, max_requests, max_requests), 0.25
    former, pool, ahead = DensityFirstBatchFormer(CONFIG), dict[RequestId, PooledRequest](), dict[RequestId, int]()
    inserted_s: dict[RequestId, float] = {}

    def assert_within_bound(request_id: RequestId, now: float) -> None:
        """Check the bound: each of those that were ahead in the leaf may cost one more turn of all leaves."""
        bound_s = (ahead[request_id] + 1) * (STARVATION_S + NUM_LEAVES * period_s)
        assert now - inserted_s[request_id] <= bound_s

    for number in range(150):
        now = number * period_s
        for turn in range(max_requests + 1):
            context_len = rng.randint(1, 64) if rng.random() < 0.1 else 6
            one = PooledRequest(RequestId(f"r{number}-{turn}"), context_len, rng.randint(1, 9), now, None)
            ahead[one.request_id] = sum(leaf_of(other) == leaf_of(one) for other in pool.values())
            former.insert(one, now)
            pool[one.request_id], inserted_s[one.request_id] = one, now
        batch = former.form(limits, now)
        assert batch is not None
        for request_id in batch.request_ids:
            former.remove(request_id)
            del pool[request_id]
            assert_within_bound(request_id, now)
    for request_id in pool:
        assert_within_bound(request_id, 150 * period_s)
