"""Blocks between a device and memory that is registered with its driver: what is copied, summed, undone and when."""

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from alignedserve.runtime.device.accelerator import CudaAccelerator
from alignedserve.runtime.device.streams import DeviceStreams, HostStreams
from alignedserve.runtime.kv.block_storage import DevicePieces
from alignedserve.runtime.kv.direct_copies import DirectCopies, HostSide, PeerSide
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.local_transfer import ShmTransfer
from kernels.cpu.block_copies import BlockList, digest_blocks
from tests.harnesses.transfer import filled, layout_of
from tests.support.devices.checked_streams import CheckedStreams
from tests.support.devices.cpu_accelerator import CpuAccelerator, cpu_lanes
from tests.support.devices.device_stand_in import LINK, Machine
from tests.support.devices.memory_drivers import NotedDriver
from tests.support.fake_cuda import fake_cuda

NUM_BLOCKS, BLOCK_BYTES = 13, 264
LAYOUT = layout_of("float32")
ON_DEVICE = np.array([4, 1, 9, 0, 12, 3, 7])
THERE = np.array([5, 6, 7, 2, 0, 1, 11])

stream_kinds = pytest.mark.parametrize("make_streams", [HostStreams, lambda: CheckedStreams(3)])
stages = pytest.mark.parametrize("staged_blocks", [1, 3, 100])
ways = pytest.mark.parametrize("is_straight", [True, False])


def direct(streams: DeviceStreams | None = None, staged_blocks: int = 3, is_straight: bool = False) -> DirectCopies:
    """Copies that gather blocks in staging memory, or copy them straight however small they are."""
    return DirectCopies(
        CpuAccelerator(streams),
        staged_bytes=staged_blocks * BLOCK_BYTES,
        least_straight_bytes=0 if is_straight else 1 << 20,
    )


def random_blocks(seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)


def host_side(rows: torch.Tensor) -> HostSide:
    return HostSide(BlockList(rows.numpy(), THERE))


def peer_side(rows: torch.Tensor) -> PeerSide:
    return PeerSide(rows, THERE)


@stream_kinds
@stages
@ways
@pytest.mark.parametrize("side", [host_side, peer_side])
def test_blocks_go_out_and_come_back(
    side: Callable[[torch.Tensor], HostSide | PeerSide],
    is_straight: bool,
    staged_blocks: int,
    make_streams: Callable[[], DeviceStreams],
) -> None:
    blocks, there = torch.from_numpy(random_blocks(1)), torch.from_numpy(random_blocks(2))
    copies = direct(make_streams(), staged_blocks, is_straight)
    digests = copies.copy_out(blocks, ON_DEVICE, side(there))
    assert torch.equal(there[THERE], blocks[ON_DEVICE])
    others = [block for block in range(NUM_BLOCKS) if block not in THERE]
    assert (there.numpy()[others] == random_blocks(2)[others]).all()
    assert digests.tolist() == digest_blocks(BlockList(blocks.numpy(), ON_DEVICE)).tolist()
    blocks.zero_()
    assert copies.copy_in(side(there), blocks, ON_DEVICE).tolist() == digests.tolist()
    assert torch.equal(blocks[ON_DEVICE], there[THERE])
    untouched = [block for block in range(NUM_BLOCKS) if block not in ON_DEVICE]
    assert not blocks[untouched].any()


@ways
def test_nothing_is_copied_of_an_empty_list(is_straight: bool) -> None:
    blocks, nothing = torch.from_numpy(random_blocks(1)), np.empty(0, np.int64)
    there = HostSide(BlockList(random_blocks(2), nothing))
    copies = direct(is_straight=is_straight)
    assert not len(copies.copy_out(blocks, nothing, there))
    assert not len(copies.copy_in(there, blocks, nothing))


def test_large_blocks_are_copied_straight_and_small_ones_are_gathered() -> None:
    def staged_by(block_bytes: int) -> int:
        accelerator = CpuAccelerator()
        blocks = torch.zeros((4, block_bytes), dtype=torch.uint8)
        host, ids = np.zeros((4, block_bytes), np.uint8), np.array([2, 0, 3])
        copies = DirectCopies(accelerator)
        copies.copy_out(blocks, ids, HostSide(BlockList(host, ids)))
        copies.copy_in(HostSide(BlockList(host, ids)), blocks, ids)
        return accelerator.num_large_rows

    assert staged_by(256 << 10) == 0
    assert staged_by(80 << 10) > 0


@pytest.mark.parametrize("block_bytes", [80 << 10, 256 << 10])
def test_a_list_goes_to_a_peer_in_one_copy_and_comes_in_one(block_bytes: int) -> None:
    """A copy of each block costs the host as much as a link needs for ten times its bytes."""
    machine = Machine(2)
    one, other = machine.device("one"), machine.device("other")
    one.use()
    own, theirs = one.empty(6, block_bytes), other.empty(6, block_bytes)
    copies, there = DirectCopies(one), PeerSide(theirs, np.array([1, 5, 3]))
    copies.copy_out(own, np.array([4, 2, 0]), there)
    copies.copy_in(there, own, np.array([0, 1, 2]))
    crossed = machine.moved(LINK)
    assert [(copy.source, copy.target, copy.num_bytes) for copy in crossed] == [
        ("one", "other", 3 * block_bytes),
        ("other", "one", 3 * block_bytes),
    ]


def test_no_blocks_are_no_copy_on_a_gpu_either() -> None:
    """As of a fetch that the owner refuses: page-locked memory without elements is none to the driver."""
    with fake_cuda():
        accelerator, none = CudaAccelerator(torch.device("cuda", 0)), np.empty(0, np.int64)
        copies, rows = DirectCopies(accelerator), accelerator.empty(4, 64)
        assert not len(copies.copy_in(PeerSide(rows, none), rows, none))
        assert not len(copies.copy_out(rows, none, PeerSide(rows, none)))


# --- lanes


def test_copies_one_after_the_other_share_a_lane_and_those_at_once_do_not() -> None:
    """PyTorch hands out 32 streams in turn: one for each copy is soon the one that computes."""
    accelerator = CpuAccelerator()
    lanes = CopyLanes(accelerator)
    for _ in range(40):
        with lanes.direct():
            pass
    assert accelerator.num_streams_made == 1
    with lanes.direct() as first, lanes.direct() as second:
        assert first is not second
    with lanes.direct(), lanes.direct():
        pass
    assert accelerator.num_streams_made == 2


def test_a_walk_that_is_left_gives_its_lane_back() -> None:
    accelerator = CpuAccelerator()
    pieces = DevicePieces(torch.from_numpy(random_blocks(1)), CopyLanes(accelerator))
    for _ in range(3):
        walk = pieces.pieces_to_read(np.array([4, 1, 9]))
        next(walk)
        del walk
        gc.collect()
    assert accelerator.num_streams_made == 1


# --- registration


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.create(tmp_path / "pool.arena", LAYOUT, 8)


def test_an_arena_is_registered_once_and_until_it_is_closed(arena: Arena) -> None:
    driver, storage = NotedDriver(), filled(LAYOUT, 1)
    transfer, _ = (ShmTransfer(storage, arena, lanes=cpu_lanes(driver=driver)) for _ in range(2))
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
    transfer = ShmTransfer(filled(LAYOUT, 1), arena, lanes=cpu_lanes(driver=NotedDriver(num_allowed=0)))
    assert not arena.is_registered
    assert "not registered with the GPU's driver: out of memory" in caplog.text
    transfer.close()
