"""Caches that an iteration swaps to host memory and back, in a real block storage."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.messages.iterations import Swap, Swaps
from alignedserve.runtime.device.streams import DeviceStreams, HostStreams
from alignedserve.runtime.engine.swap_space import SlotSwapSpace, SwapSpace
from alignedserve.runtime.kv.block_storage import BlockStorage
from tests.support.devices.checked_streams import CheckedStreams
from tests.support.samples import R1, R2, blocks
from tests.support.stored_blocks import read_blocks, write_blocks

LAYOUT = BlockLayout(block_size=4, num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16")


class SwapSpaceHarness:
    """Six blocks of random bytes, and the host memory beside them."""

    def __init__(self, *, is_int8: bool = False) -> None:
        self.storage = BlockStorage(LAYOUT, 6)
        self.before = np.random.default_rng(0).integers(0, 256, (6, LAYOUT.block_bytes), dtype=np.uint8)
        write_blocks(self.storage, blocks(*range(6)), self.before)
        self.cache = SwapSpace(self.storage, HostStreams(), is_int8=is_int8)

    def read(self, *numbers: int) -> npt.NDArray[np.uint8]:
        return read_blocks(self.storage, blocks(*numbers))

    def overwrite(self, *numbers: int) -> None:
        write_blocks(self.storage, blocks(*numbers), np.zeros((len(numbers), LAYOUT.block_bytes), np.uint8))

    def perform(self, *, outs: Sequence[Swap] = (), ins: Sequence[Swap] = ()) -> None:
        self.cache.perform(Swaps((), tuple(outs), tuple(ins)))


def test_one_enters_blocks_that_another_leaves_in_the_same_iteration() -> None:
    harness = SwapSpaceHarness()
    harness.perform(outs=[Swap(R1, 8, blocks(0, 1))])
    harness.perform(outs=[Swap(R2, 8, blocks(2, 3))], ins=[Swap(R1, 8, blocks(3, 2))])
    assert np.array_equal(harness.read(3, 2), harness.before[[0, 1]])
    harness.perform(ins=[Swap(R2, 8, blocks(4, 5))])
    assert np.array_equal(harness.read(4, 5), harness.before[[2, 3]])


def test_copies_of_8_bits_are_close_whatever_lies_behind_the_last_token() -> None:
    harness = SwapSpaceHarness(is_int8=True)
    shape = (6, LAYOUT.runs_per_block, LAYOUT.block_size, LAYOUT.kv_width)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    values[1, :, 3:] = float("nan")  # unused slots
    harness.storage.blocks.copy_(values.view(harness.storage.blocks.shape))
    harness.perform(outs=[Swap(R1, 7, blocks(4, 1))])
    harness.overwrite(4, 1)
    harness.perform(ins=[Swap(R1, 7, blocks(0, 5))])
    back = harness.storage.blocks.view(shape).float()
    for source, target, count in ((4, 0, 4), (1, 5, 3)):
        before, after = values[source, :, :count].float(), back[target, :, :count]
        steps = (before.amax(dim=1) - before.amin(dim=1))[:, None] / 255
        assert ((after - before).abs() <= 0.7 * steps + 2.0**-8 * after.abs() + 2.0**-11 * before.abs()).all()
        assert not torch.equal(after, before)
    untouched = [2, 3]
    assert torch.equal(harness.storage.blocks.view(shape)[untouched], values[untouched])


SHAPE = (6, 6, 4)  # blocks, keys and values of three layers, slots


class Harness:
    """Six blocks of four slots, each slot of a number of its own."""

    def __init__(self, dtype: str, streams: DeviceStreams) -> None:
        layout = BlockLayout(block_size=4, num_layers=3, num_kv_heads=2, head_dim=4, dtype=dtype)
        self.storage = BlockStorage(layout, 6)
        numbers = torch.from_numpy(np.random.default_rng(0).permutation(144)[:144].reshape(SHAPE) - 72)
        self.slots = self.storage.blocks.view(*SHAPE, -1)
        self.slots.copy_(numbers[..., None].expand(self.slots.shape))
        self.cache = SlotSwapSpace(self.storage, streams)

    def read(self) -> npt.NDArray[np.int64]:
        everything = np.arange(6)
        self.storage.pending_copies.synchronize(everything)
        return self.slots[..., 0].to(torch.int64).numpy()

    def perform(self, outs: tuple[Swap, ...] = (), ins: tuple[Swap, ...] = ()) -> None:
        self.cache.perform(Swaps((), outs, ins))


@pytest.fixture(
    params=[("float32", HostStreams), ("bfloat16", lambda: CheckedStreams(3)), ("int8", HostStreams)], ids=str
)
def harness(request: pytest.FixtureRequest) -> Harness:
    dtype, make_streams = request.param
    return Harness(dtype, make_streams())


def test_only_the_slots_of_a_part_come_back(harness: Harness) -> None:
    before = harness.read().copy()
    harness.perform(outs=(Swap(R1, 3, blocks(4, 1), first_token=2),))  # tokens 2 and 3 of block 4, and 4 of block 1
    harness.read()
    harness.slots[4], harness.slots[1] = 0, 0
    harness.perform(ins=(Swap(R1, 3, blocks(5, 0), first_token=2),))
    after = harness.read()
    assert np.array_equal(after[5, :, 2:], before[4, :, 2:])
    assert np.array_equal(after[5, :, :2], before[5, :, :2])
    assert np.array_equal(after[0, :, 0], before[1, :, 0])
    assert np.array_equal(after[0, :, 1:], before[0, :, 1:])


def test_a_reversed_cache_has_its_first_token_in_the_last_slot(harness: Harness) -> None:
    before = harness.read().copy()
    harness.perform(outs=(Swap(R1, 2, blocks(4), first_token=1, is_reversed=True),))  # slots 2 and 1
    harness.perform(ins=(Swap(R1, 2, blocks(5), first_token=1, is_reversed=True),))
    after = harness.read()
    assert np.array_equal(after[5, :, 1:3], before[4, :, 1:3])
    assert np.array_equal(after[5, :, (0, 3)], before[5, :, (0, 3)])


def test_parts_that_left_one_after_the_other_come_back_together(harness: Harness) -> None:
    before = harness.read().copy()
    harness.perform(outs=(Swap(R1, 1, blocks(2), 7, is_reversed=True),))
    harness.perform(outs=(Swap(R2, 4, blocks(3)), Swap(R1, 2, blocks(2), 5, is_reversed=True)))
    harness.perform(ins=(Swap(R1, 3, blocks(0, 4), 5, is_reversed=True),))
    assert np.array_equal(harness.read()[4, :, :3], before[2, :, :3])  # tokens 7, 6 and 5 of its second block
    harness.perform(ins=(Swap(R2, 4, blocks(5)),))
    assert np.array_equal(harness.read()[5], before[3])
