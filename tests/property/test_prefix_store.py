"""Random histories of prefix blocks in a pool: blocks conserved, no lease left over, nothing read that is not whole.

The arena holds, for each block, the tokens that were written last and its stamp; a reader checks both, as live ones do.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.messages.caches import BlocksReserved, BlocksTaken
from alignedserve.messages.events import PeerConnected, PeerDisconnected, Send, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import DropRequest
from alignedserve.messages.prefixes import (
    FindPrefix,
    PrefixBlock,
    PrefixBlocksReserved,
    PrefixBlocksWritten,
    PrefixFound,
    PrefixReleased,
    StorePrefixBlocks,
)
from kvpool.quad_tree import NO_SIZE, Entry, OrderedEntries, QuadTree
from kvpool.state import SetBlockGeneration
from tests.harnesses.pool import PoolHarness, written
from tests.support.prefixes import Context, chain, part_of
from tests.support.samples import ROUTER, epoch

WORKERS = ("decode-0", "decode-1", "decode-2")
NUM_BLOCKS = 8  # of the harness


class History(PoolHarness):
    """A pool, its arena, and workers that offer, write, find, read, and are lost amid any of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.stamps = [0] * NUM_BLOCKS
        self.bytes: list[bytes] = [b""] * NUM_BLOCKS
        self.writing: list[tuple[str, LeaseId, Sequence[BlockId], tuple[PrefixBlock, ...]]] = []
        self.reading: list[tuple[str, PrefixFound]] = []
        self.requests: list[tuple[str, BlocksReserved]] = []
        self.num_requests = self.num_read = 0
        super().__init__()
        for worker in WORKERS:
            self.link(worker, Role.DECODE_WORKER)

    @override
    def do(self, event: Any) -> list[Any]:
        commands = super().do(event)
        for command in commands:
            if isinstance(command, SetBlockGeneration):
                for block_id in command.block_ids:
                    self.stamps[block_id] = command.generation
        self.writing = [one for one in self.writing if self._is_stamped(one[2], one[1])]
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, BlocksReserved):
                self.requests.append((command.peer, command.message))
        return commands

    def _is_stamped(self, block_ids: Sequence[int], generation: int) -> bool:
        return all(self.stamps[block_id] == generation for block_id in block_ids)

    def context(self) -> Context:
        return chain(*(self.random.randrange(3) for _ in range(self.random.randrange(1, 10))))

    def step(self) -> None:
        self.now += self.random.choice((0.0, 0.1, 3.0))
        worker = self.random.choice(WORKERS)
        steps = (self.offer, self.offer, self.write, self.write, self.find, self.find, self.release, self.request)
        rare = (self.worker_lost, self.request_ends, self.tick)
        self.random.choice(steps if self.random.random() < 0.85 else rare)(worker)
        self.check()

    def offer(self, worker: str) -> None:
        context = self.context()
        num_before = self.random.randrange(len(context.blocks)) if self.random.random() < 0.3 else 0
        part = part_of(context, num_before)
        for command in self.hear(worker, StorePrefixBlocks((part,))):
            if isinstance(command, Send) and isinstance(command.message, PrefixBlocksReserved):
                (answer,) = command.message.parts
                if answer.block_ids:
                    offered = part.blocks[answer.num_known :][: len(answer.block_ids)]
                    self.writing.append((worker, answer.lease_id, answer.block_ids, offered))

    def write(self, _: str) -> None:
        if not self.writing:
            return
        writer, lease_id, block_ids, offered = self.writing.pop(self.random.randrange(len(self.writing)))
        count = len(offered) if self.random.random() < 0.8 else self.random.randrange(len(offered) + 1)
        for block_id, block in zip(block_ids[:count], offered, strict=False):
            self.bytes[block_id] = block.packed_tokens
        sums = tuple(hash(block.packed_tokens) & 0xFFFF for block in offered[:count])
        self.hear(writer, PrefixBlocksWritten(lease_id, sums))

    def find(self, worker: str) -> None:
        context = self.context()
        num_before = self.random.randrange(len(context.blocks)) if self.random.random() < 0.3 else 0
        hashes = b"".join(block.block_hash for block in context.blocks[num_before:])
        (command,) = self.hear(worker, FindPrefix(RequestId("r"), num_before, hashes))
        assert isinstance(command, Send)
        found = command.message
        assert isinstance(found, PrefixFound)
        assert found.packed_tokens == tuple(
            block.packed_tokens for block in context.blocks[num_before:][: len(found.packed_tokens)]
        )
        if found.copy is not None:
            self.reading.append((worker, found))

    def release(self, _: str) -> None:
        if not self.reading:
            return
        reader, found = self.reading.pop(self.random.randrange(len(self.reading)))
        self.hear(reader, PrefixReleased(found.lease_id, is_damaged=self.random.random() < 0.1))

    def request(self, worker: str) -> None:
        self.num_requests += 1
        self.reserve(f"r{self.num_requests}", self.random.randrange(1, 6), epoch(1), worker)

    def request_ends(self, _: str) -> None:
        if self.requests:
            worker, reserved = self.requests.pop(self.random.randrange(len(self.requests)))
            if self._is_stamped(reserved.block_ids, reserved.generation):
                told = self.hear(worker, written(reserved.request_id, reserved))
                assert any(isinstance(one, Send) and isinstance(one.message, BlocksTaken) for one in told)
            self.hear(ROUTER, DropRequest(reserved.request_id, reserved.attempt))

    def worker_lost(self, worker: str) -> None:
        self.do(PeerDisconnected(Role.DECODE_WORKER, worker))
        self.writing = [one for one in self.writing if one[0] != worker]
        self.reading = [one for one in self.reading if one[0] != worker]
        self.requests = [one for one in self.requests if one[0] != worker]
        self.do(PeerConnected(Role.DECODE_WORKER, worker))

    def tick(self, _: str) -> None:
        self.do(Ticked())

    def check(self) -> None:
        """Whatever is lent is what it was written as, and belongs to nothing else."""
        for _, found in self.reading:
            copy = found.copy
            assert copy is not None
            for run, packed in zip(copy.runs, found.packed_tokens, strict=True):
                assert self.stamps[run.first_block] == copy.generation, "lent, but taken back"
                assert self.bytes[run.first_block] == packed, "lent, but rewritten"
                assert run.checksum == hash(packed) & 0xFFFF
                self.num_read += 1

    def end(self) -> None:
        """Without workers nothing holds a block: all can be reserved by one request."""
        for worker in WORKERS:
            self.worker_lost(worker)
        self.now += 100.0
        self.do(Ticked())
        self.hear(ROUTER, DropRequest(RequestId("none"), epoch(1)))
        for number in range(self.num_requests + 1):
            self.hear(ROUTER, DropRequest(RequestId(f"r{number}"), epoch(9)))
        self.requests.clear()
        self.reserve("last", NUM_BLOCKS, epoch(1), WORKERS[0])
        assert [len(reserved.block_ids) for _, reserved in self.requests] == [NUM_BLOCKS]


def play(seed: int, num_steps: int) -> int:
    history = History(seed)
    for _ in range(num_steps):
        history.step()
    history.end()
    return history.num_read


def test_blocks_are_conserved_and_readers_see_what_was_written() -> None:
    assert sum(play(seed, 150) for seed in range(20)) > 1000


@pytest.mark.slow
def test_over_many_histories() -> None:
    assert sum(play(seed, 400) for seed in range(1000, 1400)) > 10000


# Random histories of the quad-tree against a dictionary of requests: every node's counts, members and waiting time.


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


# Random histories of the block allocator against a model made of sets.

# Positive: allocate that many. Negative: free the holding at that place, in part or whole.
STEPS = st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.integers(0, 30)), max_size=60)


@given(num_blocks=st.integers(0, 30), steps=STEPS)
def test_blocks_are_conserved_and_never_handed_out_twice(num_blocks: int, steps: list[tuple[int, bool, int]]) -> None:
    allocator = BlockAllocator(num_blocks)
    free = set(range(num_blocks))
    holdings: list[tuple[BlockId, ...]] = []
    for count, is_allocation, place in steps:
        if is_allocation or not holdings:
            taken = allocator.allocate(count)
            assert (taken is None) == (count > len(free))
            if taken is not None:
                assert len(taken) == len(set(taken)) == count
                assert set(taken) <= free
                free -= set(taken)
                holdings.append(taken)
        else:
            held = holdings.pop(place % len(holdings))
            allocator.free(held[:count])
            free |= set(held[:count])
            holdings.append(held[count:])
        assert allocator.num_free == len(free)
        assert allocator.num_used == sum(map(len, holdings)) == num_blocks - len(free)


@given(steps=STEPS)
def test_the_same_history_gives_the_same_blocks(steps: list[tuple[int, bool, int]]) -> None:
    one, other = BlockAllocator(20), BlockAllocator(20)
    for count, is_freed, _ in steps:
        taken = one.allocate(count)
        assert taken == other.allocate(count)
        if taken is not None and is_freed:
            one.free(taken)
            other.free(taken)
