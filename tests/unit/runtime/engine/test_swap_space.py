"""Caches that an iteration swaps to host memory and back, in a real block storage."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.messages.iterations import Swap, Swaps
from alignedserve.runtime.device.streams import HostStreams
from alignedserve.runtime.engine.swap_space import SwapSpace
from alignedserve.runtime.kv.block_storage import BlockStorage
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
