"""A worker's copies with real storage and arenas: loads, offloads and relays, in order with each peer."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from alignedserve.core.ids import BlockId, LeaseId
from alignedserve.messages.caches import ArenaOffered, BlockCopy, BlockRun
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    Load,
    LoadBlocks,
    OffloadBlocks,
    RelayBlocks,
)
from alignedserve.process.worker_threads import WorkerThreads
from alignedserve.runtime.kv.candidate_memory import BlockCopier
from alignedserve.runtime.kv.shm_arena import Arena
from tests.harnesses.transfer import CLIENT, content, filled, layout_of
from tests.support.samples import DECODE, POOL, R1, blocks
from tests.support.waiting import holds

T = TypeVar("T")
NUM_BLOCKS = 12
LAYOUT = layout_of("float32")
SOURCE = (3, 1)


class BlockCopierHarness:
    """A worker's storage, the pool's arena and a candidate buffer."""

    def __init__(self, folder: Path) -> None:
        self._other_threads = threading.enumerate()
        self.storage = filled(LAYOUT, 1)
        self.threads = WorkerThreads()
        self.copier = BlockCopier(self.storage, self.threads, CLIENT)
        self.pool = Arena.create(folder / "pool.arena", LAYOUT, NUM_BLOCKS)
        self.buffer = Arena.create(folder / "buffer.arena", LAYOUT, NUM_BLOCKS)

    def offer(self, arena: Arena) -> ArenaOffered:
        return ArenaOffered(str(arena.path), NUM_BLOCKS, LAYOUT.block_bytes, LAYOUT.digest().hex())

    def map_both(self) -> None:
        self.copier.map_arena(POOL, self.offer(self.pool), stamps=False)
        self.copier.map_arena(DECODE, self.offer(self.buffer), stamps=True)

    async def offload(
        self, target: str = POOL, numbers: tuple[int, ...] = (4, 6), generation: int = 7
    ) -> BlocksOffloaded:
        command = OffloadBlocks(R1, 1, blocks(*SOURCE), target, blocks(*numbers), generation, LeaseId(generation))
        return await self._over(lambda on_done: self.copier.start_offload(command, on_done))

    async def load(self, source: str, copy: BlockCopy, *numbers: int) -> BlocksLoaded:
        command = LoadBlocks(source, (Load(R1, copy, blocks(*numbers)),))
        return await self._over(lambda on_done: self.copier.start_load(command, on_done))

    async def relay(
        self, source: str, copy: BlockCopy, target: str, numbers: tuple[int, ...], generation: int
    ) -> BlocksRelayed:
        command = RelayBlocks(R1, 1, source, copy, target, blocks(*numbers), generation)
        return await self._over(lambda on_done: self.copier.start_relay(command, DECODE, on_done))

    async def _over(self, start: Callable[[Callable[[T], None]], None]) -> T:
        over: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        start(over.set_result)
        return await over

    async def in_pool(self) -> BlockCopy:
        """The source blocks, under lease 7."""
        self.pool.stamp(blocks(4, 6), 7)
        return copy_of((await self.offload()).runs, 7)

    def peers_with_threads(self) -> set[str]:
        own = [one.name for one in threading.enumerate() if one not in self._other_threads]
        return {name.removeprefix("copy ").removesuffix("_0") for name in own if name.startswith("copy ")}


def copy_of(runs: tuple[BlockRun, ...] | None, generation: int) -> BlockCopy:
    assert runs is not None, "a valid copy was refused"
    return BlockCopy(generation, 15, runs)


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[BlockCopierHarness]:
    made = BlockCopierHarness(tmp_path)
    made.map_both()
    yield made
    made.threads.close()
    made.pool.close(unlink=True)
    made.buffer.close(unlink=True)


def is_same(harness: BlockCopierHarness, *numbers: int) -> bool:
    return bool((content(harness.storage, numbers) == content(harness.storage, SOURCE)).all())


async def test_what_was_offloaded_is_loaded_again(harness: BlockCopierHarness) -> None:
    copy = await harness.in_pool()
    assert (await harness.load(POOL, copy, 9, 5)).refused == frozenset()
    assert is_same(harness, 9, 5)


async def test_from_a_buffer_into_the_pool_under_a_stale_lease_is_refused(harness: BlockCopierHarness) -> None:
    copy = copy_of((await harness.offload(DECODE)).runs, 7)
    harness.pool.stamp(blocks(2, 3), 10)
    before = harness.pool.blocks.copy()
    assert (await harness.relay(DECODE, copy, POOL, (2, 3), 9)).runs is None
    assert (harness.pool.blocks == before).all()
    assert harness.pool.is_stamped(blocks(2, 3), 10)


async def test_a_peer_that_was_never_mapped_refuses_everything(harness: BlockCopierHarness) -> None:
    copy = await harness.in_pool()
    loaded = await harness.load("stranger", copy, 9, 5)
    assert (loaded.refused, loaded.is_reached) == (frozenset({R1}), False)
    assert (await harness.offload("stranger")).runs is None
    assert (await harness.relay(POOL, copy, "stranger", (0, 1), 2)).runs is None
    assert (await harness.relay("stranger", copy, DECODE, (0, 1), 2)).runs is None


async def test_a_peer_that_is_gone_refuses_everything(harness: BlockCopierHarness) -> None:
    copy = await harness.in_pool()
    harness.copier.unmap_arena(POOL)
    assert (await harness.load(POOL, copy, 9, 5)).refused == {R1}


async def test_peers_that_are_gone_leave_no_thread(harness: BlockCopierHarness) -> None:
    wanted = await harness.in_pool()
    for number in range(9):
        harness.copier.map_arena(f"far-{number}", harness.offer(harness.pool), stamps=False)
        harness.copier.unmap_arena(f"far-{number}")
    harness.copier.map_arena("far-8", harness.offer(harness.pool), stamps=False)  # is back
    assert (await harness.load("far-8", wanted, 9, 5)).refused == frozenset()
    await holds(lambda: harness.peers_with_threads() == {POOL, DECODE, "far-8"})


async def test_an_arena_that_cannot_be_mapped_refuses_and_is_tried_again(harness: BlockCopierHarness) -> None:
    copy = await harness.in_pool()
    hidden = harness.pool.path.with_suffix(".hidden")
    harness.pool.path.rename(hidden)
    harness.copier.map_arena(POOL, harness.offer(harness.pool), stamps=False)
    assert (await harness.load(POOL, copy, 9, 5)).refused == {R1}
    hidden.rename(harness.pool.path)
    assert (await harness.load(POOL, copy, 9, 5)).refused == frozenset()


async def test_an_arena_of_our_own_is_used_without_an_offer(harness: BlockCopierHarness) -> None:
    used = asyncio.Event()
    harness.copier.use_buffer("decode-1", harness.buffer, harness.offer(harness.buffer), lambda _: used.set())
    await used.wait()
    assert (await harness.offload("decode-1")).runs is not None
    assert harness.buffer.is_stamped(blocks(4, 6), 7)


async def test_copies_with_a_peer_are_done_in_the_order_they_were_asked_for(harness: BlockCopierHarness) -> None:
    done: list[int] = []
    last: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def over(number: int) -> None:
        done.append(number)
        if number == 29:
            last.set_result(None)

    for number in range(30):
        target: tuple[BlockId, ...] = blocks(number % 6, 6 + number % 6)
        command = OffloadBlocks(R1, 1, blocks(*SOURCE), DECODE, target, number + 1)
        harness.copier.start_offload(command, lambda _, number=number: over(number))  # type: ignore[misc]
    await last
    assert done == list(range(30))
    assert harness.buffer.is_stamped(blocks(5, 11), 30)
