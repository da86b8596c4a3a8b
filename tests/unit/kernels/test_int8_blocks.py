"""Blocks of 8 bits: what comes back, and what 8 bits cannot hold."""

import pytest
import torch

from kernels.cache_blocks import RANGE_BYTES, dequantise_blocks, parts_of, quantise_blocks
from tests.support.marks import each


@each("dtype", [torch.bfloat16, torch.float32, torch.float16])
@each(("block_size", "width"), [(16, 200), (8, 64), (6, 130), (2, 1)])
def test_blocks_of_8_bits(block_size: int, width: int, dtype: torch.dtype) -> None:
    blocks = torch.randn(7, 4, block_size, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    blocks[2] = 0
    blocks[4, :, :, 0] = 100.0  # a channel of its own scale
    ids, rows = torch.tensor([6, 2, 4]), torch.zeros(3, 4 * (block_size + RANGE_BYTES) * width, dtype=torch.uint8)
    quantise_blocks(blocks, ids, rows)
    _, ranges = parts_of(rows, blocks)
    back = torch.full_like(blocks, float("nan"))
    dequantise_blocks(rows, back, ids)
    span = blocks[ids].float().amax(2) - blocks[ids].float().amin(2)
    assert (ranges[:, :, 0].float() <= span / 255 * (1 + 2.0**-10) + 2.0**-24).all()  # all levels are used
    step, size = ranges[:, :, :1].float(), blocks[ids].float().abs()
    rounding = size * (0.0 if dtype == torch.float32 else 2.0**-7) + 1e-5
    # Half a step, and as much again at the ends of the range, which float16 holds only to 2^-11.
    assert ((back[ids].float() - blocks[ids].float()).abs() <= 0.7 * step + size * 2.0**-11 + rounding).all()
    assert back[[0, 1, 3, 5]].isnan().all()


def test_what_8_bits_cannot_hold() -> None:
    blocks = torch.randn(1, 2, 8, 4)
    blocks[0, 1, 5, 2] = float("nan")
    blocks[0, 0, 3, 1] = 1e30
    ids, rows = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 96, dtype=torch.uint8)
    quantise_blocks(blocks, ids, rows)
    back = torch.zeros_like(blocks)
    dequantise_blocks(rows, back, ids)
    is_nan = torch.zeros(blocks.shape, dtype=torch.bool)
    is_nan[0, 1, :, 2] = True
    assert torch.equal(back.isnan(), is_nan)
    assert back[0, 0, 3, 1] == pytest.approx(255 * 65504.0, rel=1e-3)
