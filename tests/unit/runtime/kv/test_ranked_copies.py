"""Blocks in the memories of several ranks: each copies its own parts, over its own device, and all count."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.caches import ArenaOffered, BlockCopy
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import BlocksLoaded, BlocksOffloaded, Load, LoadBlocks, OffloadBlocks
from alignedserve.process.links import Identity
from alignedserve.process.worker_threads import WorkerThreads
from alignedserve.runtime.engine.ranks.follower_copies import FollowerCopies, FrameCount
from alignedserve.runtime.engine.ranks.group_copies import GroupCopies
from alignedserve.runtime.kv.block_copier import BlockCopier
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena, ArenaPart
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.ranked_transfer import PartsOffer, RankedTransfer
from alignedserve.runtime.kv.transfers.registry import SHM
from alignedserve.runtime.kv.transfers.shm_transfer import ShmTransfer
from kernels.cpu.rank_exchange import ExchangeBroken
from tests.support.device_stand_in import HOST, PCIE, Machine, StandInStorage

pytestmark = pytest.mark.slow

SIZE, NUM_BLOCKS, GENERATION = 3, 8, 5
IDENTITY = Identity(Role.DECODE_WORKER, "worker", b"secret")
PART = BlockLayout(block_size=8, num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32")
SOURCES, PLACES, TARGETS = (5, 2, 3, 0), (6, 1, 2, 7), (1, 4, 6, 3)


def blocks(ids: tuple[int, ...]) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, ids))


class RankedWorker:
    """The storages of a worker's ranks, each on a device of its own, and the first rank's transfer to the arena."""

    def __init__(self, name: str, machine: Machine, offered: ArenaOffered, seed: int) -> None:
        self.names = [f"{name}/{rank}" for rank in range(SIZE)]
        self.contents = []
        self.storages = []
        generator = torch.Generator().manual_seed(seed)
        for rank, device in enumerate(self.names):
            storage = BlockStorage(PART, NUM_BLOCKS, part=ArenaPart(rank, SIZE))
            storage.bytes.copy_(torch.randint(0, 256, storage.bytes.shape, generator=generator, dtype=torch.uint8))
            self.contents.append(storage.bytes)
            self.storages.append(StandInStorage(storage, machine.device(device)))
        self.num_frames = 0
        self.performed = [FrameCount() for _ in range(1, SIZE)]
        pairs = [socket.socketpair() for _ in range(1, SIZE)]
        self.others = [theirs for _, theirs in pairs]
        for theirs, storage, performed in zip(self.others, self.storages[1:], self.performed, strict=True):
            threading.Thread(target=FollowerCopies(theirs, storage, performed).follow, daemon=True).start()
        self.copies = GroupCopies([ours for ours, _ in pairs], lambda: self.num_frames)
        machine.device(self.names[0]).use()
        arena = Arena.attach(Path(offered.path), self.storages[0].part.whole(PART), self.storages[0].part)
        own = ShmTransfer(self.storages[0], arena, lanes=self.storages[0].lanes)
        self.copies.open("pool", PartsOffer(offered, IDENTITY, False, SHM))
        self.transfer = RankedTransfer(own, self.copies, "pool")

    def offload(self) -> BlockCopy | None:
        (runs,) = self.transfer.offload([OffloadRequest(blocks(SOURCES), blocks(PLACES), GENERATION)])
        return None if runs is None else BlockCopy(GENERATION, PART.block_size * len(PLACES), runs)

    def fetch(self, copy: BlockCopy) -> bool:
        (is_held,) = self.transfer.fetch([FetchRequest(copy, blocks(TARGETS))])
        return is_held


def offer_of(arena: Arena) -> ArenaOffered:
    layout = arena.layout
    return ArenaOffered(str(arena.path), NUM_BLOCKS, layout.block_bytes, layout.digest().hex(), file_id=arena.file_id)


@pytest.fixture
def machine() -> Machine:
    return Machine(seed=4)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena.create(tmp_path / "arena", ArenaPart(0, SIZE).whole(PART), NUM_BLOCKS)
    made.stamp(blocks(PLACES), GENERATION)
    yield made
    made.close(unlink=True)


@pytest.fixture
def workers(arena: Arena, machine: Machine) -> Iterator[tuple[RankedWorker, RankedWorker]]:
    offered = offer_of(arena)
    pair = RankedWorker("one", machine, offered, 1), RankedWorker("other", machine, offered, 2)
    yield pair
    for worker in pair:
        worker.copies.end()


def test_each_rank_copies_its_part_once_each_way_over_its_own_device(
    arena: Arena, machine: Machine, workers: tuple[RankedWorker, RankedWorker]
) -> None:
    one, other = workers
    copy = one.offload()
    assert copy is not None
    parts = arena.blocks.reshape(NUM_BLOCKS, SIZE, -1)
    for rank, content in enumerate(one.contents):
        assert np.array_equal(parts[list(PLACES), rank], content.numpy()[list(SOURCES)])
    assert other.fetch(copy)
    for source, target in zip(one.contents, other.contents, strict=True):
        assert torch.equal(source[list(SOURCES)], target[list(TARGETS)])
    for name in one.names:
        assert sum(copy.num_bytes for copy in machine.moved(PCIE, name, HOST)) == len(SOURCES) * PART.block_bytes
    for name in other.names:
        assert sum(copy.num_bytes for copy in machine.moved(PCIE, HOST, name)) == len(SOURCES) * PART.block_bytes
    assert len({(copy.source, copy.target) for copy in machine.moved(PCIE)}) == 2 * SIZE


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_part_that_has_changed_is_refused_whosever_it_is(
    rank: int, arena: Arena, workers: tuple[RankedWorker, RankedWorker]
) -> None:
    copy = workers[0].offload()
    assert copy is not None
    arena.blocks[PLACES[1], rank * PART.block_bytes + 17] ^= 1
    assert not workers[1].fetch(copy)


def test_blocks_of_another_lease_are_refused(arena: Arena, workers: tuple[RankedWorker, RankedWorker]) -> None:
    copy = workers[0].offload()
    assert copy is not None
    arena.stamp(blocks(PLACES[:1]), GENERATION + 1)
    assert workers[0].offload() is None
    assert not workers[1].fetch(copy)


def test_a_rank_copies_behind_the_steps_that_the_first_has_told_of(
    machine: Machine, workers: tuple[RankedWorker, RankedWorker]
) -> None:
    """Among them are swaps of the same blocks."""
    one, _ = workers
    one.num_frames = 2
    for performed in one.performed:
        performed.add()
    with ThreadPoolExecutor(1, initializer=machine.device(one.names[0]).use) as thread:
        copying = thread.submit(one.offload)
        while not machine.moved(PCIE, one.names[0], HOST):
            threading.Event().wait(0.001)
        assert [machine.moved(PCIE, name, HOST) for name in one.names[1:]] == [[], []]
        for performed in one.performed:
            performed.add()
        assert copying.result(60.0) is not None


def test_a_rank_that_ends_fails_what_is_waited_for_and_what_comes(workers: tuple[RankedWorker, RankedWorker]) -> None:
    one, _ = workers
    one.num_frames = 1  # which it never performs
    waited = one.copies.offload("pool", [OffloadRequest(blocks(SOURCES), blocks(PLACES), GENERATION)])
    one.others[1].shutdown(socket.SHUT_RDWR)
    with pytest.raises(ExchangeBroken):
        waited()
    with pytest.raises(ExchangeBroken):
        one.offload()
    one.transfer.close()


async def test_a_worker_s_copies_are_those_of_all_its_ranks(
    arena: Arena, machine: Machine, workers: tuple[RankedWorker, RankedWorker]
) -> None:
    worker, name = workers[0], RequestId("a")
    before = [content[list(SOURCES)] for content in worker.contents]
    threads = WorkerThreads(machine.device(worker.names[0]).use)
    copier = BlockCopier(worker.storages[0], threads, IDENTITY, ranks=worker.copies)
    offloaded: asyncio.Queue[BlocksOffloaded] = asyncio.Queue()
    loaded: asyncio.Queue[BlocksLoaded] = asyncio.Queue()
    copier.map_arena("pool", offer_of(arena), stamps=False)
    command = OffloadBlocks(name, 0, blocks(SOURCES), "pool", blocks(PLACES), GENERATION)
    copier.start_offload(command, offloaded.put_nowait)
    async with asyncio.timeout(60):
        runs = (await offloaded.get()).runs
        assert runs is not None
        for generation, refused in ((GENERATION, frozenset[RequestId]()), (GENERATION + 1, frozenset({name}))):
            copy = BlockCopy(generation, PART.block_size * len(PLACES), runs)
            copier.start_load(LoadBlocks("pool", (Load(name, copy, blocks(TARGETS)),)), loaded.put_nowait)
            assert (await loaded.get()).refused == refused
    threads.close()
    copier.close()
    assert all(map(torch.equal, before, (content[list(TARGETS)] for content in worker.contents)))
