"""Rows of a cache of FP8, in plain PyTorch: how far they are from what was stored."""

import pytest
import torch

from alignedserve.core.block_layout import FP8, BlockLayout
from kernels.cache_rows import dequantise_float8_rows, quantise_float8_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_changes_by_at_most_a_sixteenth(dtype: torch.dtype) -> None:
    heads = (torch.randn(50, 3, 64) * torch.logspace(-6, 6, 50)[:, None, None]).to(dtype)
    rows = quantise_float8_rows(heads)
    assert rows.shape == (50, 3 * 68)
    back = dequantise_float8_rows(rows, 3, torch.empty(50, 192)).view(heads.shape)
    exact = heads.double()
    scale = exact.abs().amax(-1, keepdim=True) / 448
    assert ((back - exact).abs() <= exact.abs() / 16 + scale * 2**-10 + 1e-30).all()
    assert torch.allclose(back.abs().amax(-1).double(), exact.abs().amax(-1), rtol=1e-6), "the largest is kept"


def test_what_float8_cannot_hold() -> None:
    heads = torch.ones(1, 3, 8)
    heads[0, 0, 3], heads[0, 1] = float("inf"), 0.0
    back = dequantise_float8_rows(quantise_float8_rows(heads), 3, torch.empty(1, 24)).view(3, 8)
    assert back[0].isnan().all(), "a head that is not finite is none"
    assert not back[1].any()
    assert (back[2] == 1.0).all()


def test_blocks_are_about_half_of_bfloat16() -> None:
    half, narrow = (BlockLayout(16, 32, 8, 128, dtype) for dtype in ("bfloat16", FP8))
    assert narrow.block_bytes / half.block_bytes == pytest.approx(132 / 256)
    assert narrow.digest() != half.digest()
