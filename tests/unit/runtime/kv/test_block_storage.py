"""Block layout and block storage."""

import numpy as np
import psutil
import pytest
import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import ConfigError, NotEnoughMemory
from alignedserve.core.ids import BlockId
from alignedserve.runtime.kv.block_storage import BlockStorage
from tests.support.stored_blocks import write_blocks

LAYOUT = BlockLayout(block_size=4, num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16")


def test_sizes() -> None:
    assert LAYOUT.block_bytes == 3 * 2 * 4 * 2 * 8 * 2
    assert LAYOUT.token_bytes == LAYOUT.block_bytes // 4
    assert LAYOUT.run_elements == 4 * 2 * 8
    assert LAYOUT.runs_per_block == 6


def test_bad_layouts_name_the_field() -> None:
    with pytest.raises(ConfigError, match="num_layers"):
        BlockLayout(block_size=4, num_layers=0, num_kv_heads=2, head_dim=8, dtype="float32")
    with pytest.raises(ConfigError, match="int4"):
        BlockLayout(block_size=4, num_layers=1, num_kv_heads=2, head_dim=8, dtype="int4")


def test_views_lie_in_the_documented_order() -> None:
    storage = BlockStorage(LAYOUT, 5)
    one_block = np.arange(LAYOUT.block_elements, dtype=np.float32) % 251
    shape = (3, 2, 4, 2, 8)
    content = torch.from_numpy(one_block).to(torch.bfloat16)
    write_blocks(storage, [BlockId(3)], content.view(torch.uint8).numpy()[None])
    for layer in range(3):
        assert torch.equal(storage.blocks[:, layer, 0][3], content.view(shape)[layer, 0])
        assert torch.equal(storage.blocks[:, layer, 1][3], content.view(shape)[layer, 1])
        key_run = storage.key_runs(layer)[3 * storage.run_stride]
        assert torch.equal(key_run, content.view(shape)[layer, 0].flatten())
        value_slot = storage.value_slots(layer)[3 * storage.slot_stride + 2]
        assert torch.equal(value_slot, content.view(shape)[layer, 1, 2].flatten())


def test_blocks_outside_the_storage_are_broken_invariants() -> None:
    storage = BlockStorage(LAYOUT, 2)
    for block in (-1, 2):
        with pytest.raises(AssertionError, match="outside"):
            storage.pieces_to_read([BlockId(block)])
        with pytest.raises(AssertionError, match="outside"):
            storage.pieces_to_write([BlockId(block)])


def test_too_much_memory_says_how_much_is_needed() -> None:
    with pytest.raises(NotEnoughMemory, match=str(LAYOUT.block_bytes << 40)):
        BlockStorage(LAYOUT, 1 << 40)


def test_memory_that_was_used_is_given_back_but_for_the_first_blocks() -> None:
    """What a host keeps while it idles, after its calibration has written all blocks."""
    layout = BlockLayout(num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, dtype="float32")
    storage = BlockStorage(layout, (96 << 20) // layout.block_bytes)
    before = psutil.Process().memory_info().rss
    storage.bytes.fill_(1)
    written = psutil.Process().memory_info().rss - before
    storage.give_back()
    assert written > 20 << 20
    assert psutil.Process().memory_info().rss - before < written - (20 << 20)
    assert int(storage.bytes[-1].sum()) == 0
    storage.bytes[-1] = 7
    assert int(storage.bytes[-1][0]) == 7
