"""Blocks between a device and memory that is registered with its driver: what is copied, summed, undone and when."""

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from alignedserve.runtime.device.registered_memory import RegisteredMemory
from alignedserve.runtime.device.streams import CheckedStreams, DeviceStreams, HostStreams
from alignedserve.runtime.kv.direct_copies import DirectCopies
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.shm_transfer import ShmTransfer
from kernels.cpu.block_copies import BlockList, digest_blocks
from tests.harnesses.transfer import filled, layout_of
from tests.support.memory_drivers import NotedDriver

NUM_BLOCKS, BLOCK_BYTES = 13, 264
LAYOUT = layout_of("float32")
ON_DEVICE = np.array([4, 1, 9, 0, 12, 3, 7])
ON_HOST = np.array([5, 6, 7, 2, 0, 1, 11])

stream_kinds = pytest.mark.parametrize("make_streams", [HostStreams, lambda: CheckedStreams(3)])
stages = pytest.mark.parametrize("staged_blocks", [1, 3, 100])


def random_blocks(seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)


@stream_kinds
@stages
def test_blocks_go_out_and_come_back(staged_blocks: int, make_streams: Callable[[], DeviceStreams]) -> None:
    blocks, host = torch.from_numpy(random_blocks(1)), random_blocks(2)
    before = host.copy()
    copies = DirectCopies(blocks, streams=make_streams(), staged_bytes=staged_blocks * BLOCK_BYTES)
    digests = copies.copy_out(ON_DEVICE, BlockList(host, ON_HOST))
    assert (host[ON_HOST] == blocks.numpy()[ON_DEVICE]).all()
    others = [block for block in range(NUM_BLOCKS) if block not in ON_HOST]
    assert (host[others] == before[others]).all()
    assert digests.tolist() == digest_blocks(BlockList(host, ON_HOST)).tolist()
    blocks.zero_()
    assert copies.copy_in(BlockList(host, ON_HOST), ON_DEVICE).tolist() == digests.tolist()
    assert (blocks.numpy()[ON_DEVICE] == host[ON_HOST]).all()
    untouched = [block for block in range(NUM_BLOCKS) if block not in ON_DEVICE]
    assert not blocks[untouched].any()


def test_nothing_is_copied_of_an_empty_list() -> None:
    copies, nothing = DirectCopies(torch.from_numpy(random_blocks(1))), np.empty(0, np.int64)
    assert not len(copies.copy_out(nothing, BlockList(random_blocks(2), nothing)))
    assert not len(copies.copy_in(BlockList(random_blocks(2), nothing), nothing))


# --- registration


def test_large_memory_is_registered_in_chunks() -> None:
    driver = NotedDriver(largest=100)
    memory = RegisteredMemory(driver, 5000, 250, chunk_bytes=100)
    assert memory.obstacle is None
    assert driver.registered == {5000: 100, 5100: 100, 5200: 50}
    memory.close()
    memory.close()
    assert driver.registered == {}


def test_memory_is_registered_as_a_whole_or_not_at_all() -> None:
    driver = NotedDriver(num_allowed=2)
    memory = RegisteredMemory(driver, 5000, 250, chunk_bytes=100)
    assert memory.obstacle == "out of memory"
    assert driver.registered == {}
    assert driver.calls[-2:] == [("unregister", 5100), ("unregister", 5000)]


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.create(tmp_path / "pool.arena", LAYOUT, 8)


def test_an_arena_is_registered_once_and_until_it_is_closed(arena: Arena) -> None:
    driver, storage = NotedDriver(), filled(LAYOUT, 1)
    transfer, _ = (ShmTransfer(storage, arena, driver=driver) for _ in range(2))
    assert arena.is_registered
    assert list(driver.registered.values()) == [arena.path.stat().st_size]
    transfer.close()
    assert driver.registered == {}
    assert len(driver.calls) == 2


def test_an_arena_that_is_dropped_is_unregistered_before_it_is_unmapped(arena: Arena) -> None:
    driver = NotedDriver()
    arena.register(driver)
    mapped = Arena.attach(arena.path, LAYOUT)
    mapped.register(driver)
    assert len(driver.registered) == 2
    del mapped
    gc.collect()
    assert len(driver.registered) == 1
    arena.close(unlink=True)
    assert driver.registered == {}


def test_a_driver_that_refuses_leaves_copies_through_the_host(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    transfer = ShmTransfer(filled(LAYOUT, 1), arena, driver=NotedDriver(num_allowed=0))
    assert not arena.is_registered
    assert "not registered with the GPU's driver: out of memory" in caplog.text
    transfer.close()
