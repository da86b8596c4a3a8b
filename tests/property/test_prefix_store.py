"""Random histories of prefix blocks in a pool: blocks conserved, no lease left over, nothing read that is not whole.

The arena holds, for each block, the tokens that were written last and its stamp; a reader checks both, as live ones do.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from typing_extensions import override

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
