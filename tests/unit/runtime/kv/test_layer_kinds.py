"""Blocks whose layers have heads of two sizes: what they take, and that all that leaves a block comes back."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout, LayerHeads
from alignedserve.messages.iterations import Swap, Swaps
from alignedserve.runtime.device.streams import HostStreams
from alignedserve.runtime.engine.swap_space import SlotSwapSpace, SwapSpace
from alignedserve.runtime.kv.block_storage import BlockStorage, LayerKind
from alignedserve.runtime.model.model_files import read_model_config
from tests.support.samples import R1, blocks

NUM_BLOCKS, BLOCK_SIZE = 6, 4
# Rows of 2 x 8 and 24 elements lie at whole rows from block to block: none of 2 x 8 and 36, nor of int8.
SIZES = {"whole": ("float32", 24), "apart": ("float32", 36), "int8": ("int8", 24)}
GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 512,
    "hidden_size": 640,
    "intermediate_size": 640,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
}


@pytest.fixture(params=list(SIZES))
def storage(request: pytest.FixtureRequest) -> BlockStorage:
    dtype, wide = SIZES[request.param]
    return BlockStorage(BlockLayout(BLOCK_SIZE, 5, 2, 8, dtype, unlike=(LayerHeads(2, 1, wide),)), NUM_BLOCKS)


def _written(storage: BlockStorage) -> list[Tensor]:
    """Write rows of their own into all slots of both kinds, in a random order; return them as `slots` has them."""
    order = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(0))
    written = []
    for kind in storage.kinds:
        expected = torch.randint_like(kind.slots.contiguous(), -100, 100)
        for layer in range(kind.layout.num_layers):
            keys, values = (expected[:, 2 * layer + part].flatten(0, 1)[order] for part in range(2))
            kind.write(layer, kind.rows(order), _Rows(keys, values))
        written.append(expected)
    return written


class _Rows:
    """Writes rows of keys and values."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values

    def __call__(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        for own, part in ((self._keys, keys), (self._values, values)):
            assert part.is_contiguous()
            part.index_copy_(0, rows, own)


def _read(kind: LayerKind) -> list[Tensor]:
    """Return what attention reads of each layer [blocks, elements]."""
    return [runs(layer) for layer in range(kind.layout.num_layers) for runs in (kind.key_runs, kind.value_runs)]


def test_each_layer_reads_what_was_written_for_it(storage: BlockStorage) -> None:
    for kind, expected in zip(storage.kinds, _written(storage), strict=True):
        assert torch.equal(torch.stack(_read(kind), dim=1), expected.flatten(2))
        assert torch.equal(kind.blocks.flatten(4).flatten(1), expected.flatten(1))


def test_caches_come_back_by_blocks_and_by_slots(storage: BlockStorage) -> None:
    slots, swap = SlotSwapSpace(storage, HostStreams()), Swap(R1, 7, blocks(4, 1))
    for cache in (SwapSpace(storage, HostStreams()), slots):
        before = _written(storage)
        cache.perform(Swaps((), (swap,), ()))
        storage.zero_blocks(np.array([4, 1]))
        cache.perform(Swaps((), (), (swap,)))
        for kind, expected in zip(storage.kinds, before, strict=True):
            assert torch.equal(kind.slots[4], expected[4])
            assert torch.equal(kind.slots[1, :, :3], expected[1, :, :3])
            assert torch.equal(kind.slots[[0, 2, 3, 5]], expected[[0, 2, 3, 5]])


def test_copies_of_8_bits_are_close() -> None:
    storage = BlockStorage(BlockLayout(BLOCK_SIZE, 5, 2, 8, "bfloat16", unlike=(LayerHeads(2, 1, 24),)), NUM_BLOCKS)
    before = _written(storage)
    cache = SwapSpace(storage, HostStreams(), is_int8=True)
    cache.perform(Swaps((), (Swap(R1, 8, blocks(4, 1)),), ()))
    storage.zero_blocks(np.array([4, 1]))
    cache.perform(Swaps((), (), (Swap(R1, 8, blocks(0, 5)),)))
    for kind, expected in zip(storage.kinds, before, strict=True):
        assert float((kind.slots[[0, 5]] - expected[[4, 1]]).abs().max()) <= 1.5  # of ranges up to 200


def test_tails_are_zeroed_on_layers_of_both_kinds(storage: BlockStorage) -> None:
    before = _written(storage)
    storage.zero_tail(blocks(2)[0], 3)
    storage.copy_first_slots(torch.tensor([1]), torch.tensor([5]))
    for kind, expected in zip(storage.kinds, before, strict=True):
        expected[2, :, 3:] = 0
        expected[5, :, 0] = expected[1, :, 0]
        assert torch.equal(kind.slots, expected)


def test_a_model_takes_what_its_heads_need_everywhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4))
    config = read_model_config(tmp_path)
    needed = 2 * (25 * 8 * 256 + 5 * 2 * 512) * 2  # bytes of a token in bfloat16
    layout, shape = config.block_layout(16, "bfloat16"), config.shape("gemma4", "bfloat16")
    assert layout.block_bytes == 16 * needed
    assert config.kv_token_bytes("bfloat16") == layout.token_bytes == shape.kv_token_bytes == needed
    assert shape.pair_flops == 4 * 8 * (25 * 256 + 5 * 512)
