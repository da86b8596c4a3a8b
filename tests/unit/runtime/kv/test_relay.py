"""From the pool's arena into a candidate buffer: verified on the way, with checksums of its own there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from alignedserve.messages.caches import BlockCopy
from alignedserve.runtime.kv.block_checksums import source_blocks
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.local_transfer import OwnBufferTransfer, ShmTransfer, relay
from alignedserve.runtime.kv.transfers.requests import DeviceBuffer
from tests.harnesses.transfer import NUM_POOL_BLOCKS, changed, content, filled, layout_of, run_of
from tests.support.devices.cpu_accelerator import cpu_lanes
from tests.support.devices.memory_drivers import NotedDriver
from tests.support.marks import each
from tests.support.samples import blocks

LAYOUT = layout_of("float32")
SOURCE = (3, 8, 1, 14, 6)


class Arenas:
    """The pool's, with one request of five blocks in it, and a candidate buffer."""

    def __init__(self, folder: Path) -> None:
        self.pool = Arena.create(folder / "pool.arena", LAYOUT, NUM_POOL_BLOCKS)
        self.buffer = Arena.create(folder / "buffer.arena", LAYOUT, NUM_POOL_BLOCKS)
        self.storage = filled(LAYOUT, 1)
        self.pool.stamp(blocks(4, 5, 1, 2, 9), 77)
        outgoing = OffloadRequest(blocks(*SOURCE), blocks(4, 5, 1, 2, 9), 77)
        self.from_pool = ShmTransfer(self.storage, self.pool)
        self.to_buffer = ShmTransfer(self.storage, self.buffer, stamps=True)
        (runs,) = self.from_pool.offload([outgoing])
        assert runs is not None
        self.copy = BlockCopy(77, 37, runs)

    def relay(self, copy: BlockCopy, *target: int, generation: int = 5) -> BlockCopy | None:
        runs = relay(self.from_pool, copy, self.to_buffer, blocks(*target), generation)
        return None if runs is None else BlockCopy(generation, copy.context_len, runs)


@pytest.fixture
def arenas(tmp_path: Path) -> Iterator[Arenas]:
    made = Arenas(tmp_path)
    yield made
    made.pool.close(unlink=True)
    made.buffer.close(unlink=True)


@pytest.mark.parametrize("target", [(7, 6, 5, 4, 3), (0, 1, 2, 3, 4), (11, 12, 1, 2, 3)])
def test_a_relayed_copy_is_fetched_from_the_buffer(arenas: Arenas, target: tuple[int, ...]) -> None:
    copy = arenas.relay(arenas.copy, *target)
    assert copy is not None
    assert source_blocks(copy, layout=LAYOUT, num_targets=5, num_blocks=NUM_POOL_BLOCKS).tolist() == [*target]
    receiver = filled(LAYOUT, 2)
    assert ShmTransfer(receiver, arenas.buffer).fetch([FetchRequest(copy, blocks(0, 1, 2, 3, 4))]) == [True]
    assert (content(receiver, range(5)) == content(arenas.storage, SOURCE)).all()


def test_what_does_not_hold_is_not_relayed(arenas: Arenas) -> None:
    first, *rest = arenas.copy.runs
    spoilt = [
        changed(arenas.copy, generation=76),
        changed(arenas.copy, context_len=41),
        changed(arenas.copy, runs=(run_of(first, checksum=first.checksum ^ 1), *rest)),
        changed(arenas.copy, runs=(*rest, first)),
        changed(arenas.copy, runs=(first, run_of(rest[0], first_block=NUM_POOL_BLOCKS), rest[1])),
        changed(arenas.copy, runs=(run_of(first, num_blocks=-1), run_of(first, num_blocks=6))),
    ]
    for copy in spoilt:
        assert arenas.relay(copy, 7, 6, 5, 4, 3) is None
        assert not arenas.buffer.generations.any()
    arenas.pool.blocks[9, 0] ^= 1
    assert arenas.relay(arenas.copy, 7, 6, 5, 4, 3) is None
    assert not arenas.buffer.generations.any()


@each("target", [(), (7, 6, 5, 4), (7, 6, 5, 4, 3, 2), (7, 6, 5, 4, NUM_POOL_BLOCKS), (7, 6, 5, 4, 4)])
def test_targets_that_do_not_fit_are_refused(arenas: Arenas, target: tuple[int, ...]) -> None:
    assert arenas.relay(arenas.copy, *target) is None
    assert not arenas.buffer.generations.any()
    assert not arenas.buffer.blocks.any()


@pytest.mark.parametrize("is_registered", [True, False])
def test_into_a_buffer_on_a_device_and_back_into_the_pool(arenas: Arenas, is_registered: bool) -> None:
    lanes = cpu_lanes(driver=NotedDriver(num_allowed=is_registered))
    pool = ShmTransfer(arenas.storage, arenas.pool, lanes=lanes)
    assert arenas.pool.is_registered == is_registered
    rows = torch.zeros((NUM_POOL_BLOCKS, LAYOUT.block_bytes), dtype=torch.uint8)
    buffer = DeviceBuffer(LAYOUT, rows, lanes)
    lent = OwnBufferTransfer(arenas.storage, buffer)
    runs = relay(pool, arenas.copy, lent, blocks(7, 6, 5, 9, 3), 5)
    assert runs is not None
    assert [(run.first_block, run.num_blocks) for run in runs] == [(7, 1), (6, 1), (5, 1), (9, 1), (3, 1)]
    assert (rows.numpy()[[7, 6, 5, 9, 3]] == content(arenas.storage, SOURCE)).all()
    assert buffer.is_stamped(blocks(7, 6, 5, 9, 3), 5)
    receiver = filled(LAYOUT, 2)
    fetching = OwnBufferTransfer(receiver, buffer)
    assert fetching.fetch([FetchRequest(BlockCopy(5, 37, runs), blocks(0, 1, 2, 3, 4))]) == [True]
    assert (content(receiver, range(5)) == content(arenas.storage, SOURCE)).all()
    arenas.pool.stamp(blocks(10, 11, 0, 12, 13), 8)
    back = relay(lent, BlockCopy(5, 37, runs), pool, blocks(10, 11, 0, 12, 13), 8)
    assert back is not None
    assert (arenas.pool.blocks[[10, 11, 0, 12, 13]] == content(arenas.storage, SOURCE)).all()
