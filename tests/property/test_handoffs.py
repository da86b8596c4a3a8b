"""Random histories of handoffs, each between any two of three workers.

Messages are late, come twice, or are lost with their link; links and workers die at any step, and requests are given
up. Every handoff ends on both sides, every block is free or of one request, and what a request finds is its own.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core.block_allocator import BlockAllocator, blocks_for, contiguous_runs
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request
from alignedserve.messages.caches import BlockRun, BlocksTaken, BlocksWritten, CancelReservation, ReserveBlocks
from alignedserve.messages.events import Send
from alignedserve.messages.iterations import BlocksOffloaded, OffloadBlocks
from alignedserve.worker_core.handoff import (
    BufferSpace,
    Contents,
    HandoffEnd,
    HandoffReceiver,
    Incoming,
    Outgoing,
    Sender,
)
from tests.support.marks import many
from tests.support.samples import request

BLOCK_SIZE, NUM_BLOCKS, BUFFER_BLOCKS, NUM_REQUESTS = 4, 14, 8, 9
PAIRS = list(permutations("abc", 2))
Buffer = dict[BlockId, RequestId]  # whose cache is where


class Worker:
    """Requests in blocks, one that sends and receives them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.allocator, self.space = BlockAllocator(NUM_BLOCKS), BufferSpace()
        self.held: dict[RequestId, tuple[Request, tuple[BlockId, ...]]] = {}
        self.cache: Buffer = {}
        self.gone: set[RequestId] = set()  # whose last cache may be lost
        self.receiver = HandoffReceiver(self.space, BLOCK_SIZE, self.allocator.free)
        self.sender: Sender[Outgoing] = Sender(
            reserved=lambda entry: [self.sender.copy(entry, self.held[entry.request.request_id][1])],
            contents=lambda entry, now: Contents(entry.request.prompt_len, (7,), None, 0.0, 0.0),
            ended=self._ended,
            aborted=self._leave,
        )

    def keep(self, of: Request, block_ids: tuple[BlockId, ...]) -> None:
        self.held[of.request_id] = of, block_ids
        self.cache |= dict.fromkeys(block_ids, of.request_id)

    def hold(self, peer: str, message: ReserveBlocks) -> Incoming | None:
        is_here = message.request_id in self.held or message.num_blocks > self.allocator.num_free
        slot = None if is_here else self.space.at(peer, message.num_blocks)
        block_ids = self.allocator.allocate(message.num_blocks) if slot is not None else None
        return Incoming(message.attempt, slot, block_ids) if slot is not None and block_ids is not None else None

    def loaded(self, lent: Buffer, message: BlocksWritten) -> list[Send]:
        """Take a request over whose cache has come."""
        request_id, num_blocks = message.request.request_id, message.copy.num_blocks
        entry = self.receiver.end(request_id)
        self.space.free(entry.slot)
        is_own = {lent.get(block_id) for block_id in entry.slot.block_ids[:num_blocks]} == {request_id}
        assert is_own or entry.is_aborted, "blocks were used by another after they were offered"
        self.allocator.free(entry.block_ids[0 if entry.is_aborted else num_blocks :])
        if not entry.is_aborted:
            self.keep(message.request, entry.block_ids[:num_blocks])
        return [Send(entry.slot.peer, BlocksTaken(request_id, message.attempt, not entry.is_aborted))]

    def copied(self, lent: Buffer, is_good: Callable[[], bool], command: OffloadBlocks) -> Sequence[Any]:
        """End a copy into a buffer, which may be closed by now."""
        assert {self.cache[block_id] for block_id in command.block_ids} == {command.request_id}, "freed too early"
        lent |= dict.fromkeys(command.target_block_ids, command.request_id)
        runs = tuple(BlockRun(first, count, 0) for first, count in contiguous_runs(command.target_block_ids))
        return self.sender.copied(BlocksOffloaded(command, runs if is_good() else None), 0.0)

    def _ended(self, entry: Outgoing, how: HandoffEnd, now: float) -> Sequence[Any]:
        self.gone |= {entry.request.request_id} if how is HandoffEnd.UNKNOWN else set()
        return self._leave(entry) if how in (HandoffEnd.TAKEN, HandoffEnd.UNKNOWN) else ()

    def _leave(self, entry: Outgoing) -> Sequence[Any]:
        self.allocator.free(self.held.pop(entry.request.request_id)[1])
        return ()


class World:
    """Three workers, each linked with the others, and what is on its way."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.workers = {name: Worker(name) for name in "abc"}
        self.links: dict[tuple[str, str], deque[Any]] = {pair: deque() for pair in PAIRS}
        self.lent: dict[tuple[str, str], Buffer] = {pair: {} for pair in PAIRS}
        self.pending: list[tuple[str, Callable[[], Iterable[Any]]]] = []  # copies, by whose they are
        self.gone: set[RequestId] = set()
        self.num_asked = 0
        for one, other in PAIRS:
            self.workers[one].space.opened(other, BUFFER_BLOCKS)
        for number in range(NUM_REQUESTS):
            worker = self.workers["abc"[number % 3]]
            block_ids = worker.allocator.allocate(blocks_for(1 + number, BLOCK_SIZE))
            assert block_ids is not None
            worker.keep(request(f"r{number}", 1 + number), block_ids)

    def ask(self, worker: Worker, other: str) -> None:
        able = [of for of, _ in worker.held.values() if worker.sender.get(of.request_id) is None]
        if able:
            self.num_asked += 1
            entry = Outgoing(self.rng.choice(able), self.num_asked, other)
            num_blocks = blocks_for(entry.request.prompt_len, BLOCK_SIZE) + self.rng.randrange(2)
            self._perform(worker, [worker.sender.ask(entry, num_blocks)])

    def abort(self, worker: Worker, other: str) -> None:
        for entry in worker.sender:
            if entry.target == other and not entry.is_aborted:
                self.gone.add(entry.request.request_id)
                self._perform(worker, worker.sender.abort(entry))

    def cut(self, worker: Worker, other: str) -> None:
        """Cut a link, which is there again at once."""
        for one, two in ((worker, self.workers[other]), (self.workers[other], worker)):
            pair = one.name, two.name
            self.links[pair].clear()
            self.lent[pair] = {}
            one.space.lost(two.name)
            self._perform(one, one.sender.lost(two.name, 0.0))
            one.receiver.cancel_all(two.name)
            one.space.opened(two.name, BUFFER_BLOCKS)

    def kill(self, worker: Worker, other: str) -> None:
        self.gone |= worker.held.keys() | worker.gone
        self.pending = [entry for entry in self.pending if entry[0] != worker.name]
        self.workers[worker.name] = Worker(worker.name)
        for peer in (name for name in "abc" if name != worker.name):
            self.cut(self.workers[worker.name], peer)

    def step(self) -> bool:
        """Deliver a message, now and then twice, or end a copy; False: there are none."""
        ready = [pair for pair, messages in self.links.items() if messages]
        if not ready and not self.pending:
            return False
        place = self.rng.randrange(len(ready) + len(self.pending))
        if place < len(self.pending):
            name, end = self.pending.pop(place)
            self._perform(self.workers[name], end())
            return True
        source, target = ready[place - len(self.pending)]
        message, worker = self.links[source, target].popleft(), self.workers[target]
        for _ in range(1 + (self.rng.random() < 0.2)):
            self._perform(worker, self._receive(worker, source, message))
        return True

    def _receive(self, worker: Worker, peer: str, message: Any) -> Sequence[Any]:
        match message:
            case ReserveBlocks():
                return [worker.receiver.reserve(peer, message, lambda: worker.hold(peer, message))]
            case CancelReservation(request_id, attempt):
                worker.receiver.cancel(request_id, attempt)
                return ()
            case BlocksWritten():
                entry, answer = worker.receiver.written(peer, message)
                loaded = partial(worker.loaded, self.lent[peer, worker.name], message)
                self.pending += [] if entry is None else [(worker.name, loaded)]
                return answer
        return worker.sender.answered(peer, message, 0.0)

    def _perform(self, worker: Worker, commands: Iterable[Any]) -> None:
        for command in commands:
            if isinstance(command, Send):
                self.links[worker.name, command.peer].append(command.message)
                continue
            lent, is_good = self.lent[worker.name, command.target], lambda: self.rng.random() < 0.9
            self.pending.append((worker.name, partial(worker.copied, lent, is_good, command)))


def history(seed: int) -> int:
    """Play a history to its end, check what is left, and return how many handoffs were begun."""
    world = World(seed)
    for _ in range(300):
        one, other = world.rng.choice(PAIRS)
        if world.rng.random() < 0.3:
            world.ask(world.workers[one], other)
        if world.rng.random() < 0.02:
            world.rng.choice((world.abort, world.cut, world.kill))(world.workers[one], other)
        world.step()
    while world.step():
        pass
    held = [request_id for worker in world.workers.values() for request_id in worker.held]
    known = set(held).union(world.gone, *(worker.gone for worker in world.workers.values()))
    assert len(held) == len(set(held)), "a request is at two workers"
    assert len(known) == NUM_REQUESTS, "a request is nowhere"
    for worker in world.workers.values():
        assert (len(worker.sender), len(worker.receiver), worker.space.num_used) == (0, 0, 0)
        assert worker.allocator.num_used == sum(len(block_ids) for _, block_ids in worker.held.values())
    return world.num_asked


@given(seed=st.integers(0, 10**9))
def test_every_handoff_ends_and_no_block_leaks(seed: int) -> None:
    history(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(many(2000)))
def test_many_histories(seed: int) -> None:
    history(seed)
