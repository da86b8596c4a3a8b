"""Rows of a cache of 8 bits: what rounding costs, its bad cases, and native rounding against plain PyTorch."""

import pytest
import torch
from torch import Tensor

from kernels.cache_rows import dequantise_rows, int8_row_width, quantise_rows
from kernels.cpu.native import vector_levels
from kernels.cpu.rows import HeadRows
from kernels.rotary import HeadPlacement

# The levels of operations on rows go by the names of those of attention.
levels = pytest.mark.parametrize("level", vector_levels() or [pytest.param("", marks=pytest.mark.skip("not built"))])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def values_of(rows: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    out = torch.empty(len(rows), kv_heads * head_dim)
    return dequantise_rows(rows, kv_heads, out).view(-1, kv_heads, head_dim)


@pytest.mark.parametrize("head_dim", [1, 7, 64, 80, 128])
def test_no_value_moves_by_more_than_half_a_step(head_dim: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    heads = torch.randn(40, 3, head_dim, generator=generator) * torch.logspace(-20, 20, 40)[:, None, None]
    rows = quantise_rows(heads)
    assert rows.shape == (40, int8_row_width(3, head_dim))
    steps = heads.abs().amax(dim=-1, keepdim=True) / 127.0
    assert ((values_of(rows, 3, head_dim) - heads).abs() <= 0.5001 * steps).all()


def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    heads = torch.randn(5, 1, 8)
    heads[0], heads[1] = 0.0, 1e-38
    heads[2, 0, 3], heads[3, 0, 3] = float("nan"), float("-inf")
    values = values_of(quantise_rows(heads), 1, 8)
    assert values[:2].abs().max() == 0.0
    assert values[2:4].isnan().all()
    assert values[4].isfinite().all()


@levels
@dtypes
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 7), (3, 80), (12, 64)])
def test_native_placement_rounds_alike(kv_heads: int, head_dim: int, dtype: torch.dtype, level: str) -> None:
    generator = torch.Generator().manual_seed(kv_heads + head_dim)
    tokens, num_heads = 37, 2 * kv_heads
    fused = torch.randn(tokens, num_heads + 2 * kv_heads, head_dim, generator=generator)
    fused[3] = 0.0
    fused[4, num_heads, 0], fused[5, -1, -1] = float("nan"), float("inf")
    fused = fused.to(dtype).view(tokens, -1)
    slots = torch.randperm(tokens + 3, generator=generator)[:tokens]
    keys, values = (torch.full((tokens + 3, int8_row_width(kv_heads, head_dim)), 99).to(torch.int8) for _ in range(2))
    place = HeadRows(num_heads, kv_heads, head_dim, dtype, level=level)
    place(fused, None, slots, keys, values)
    heads = fused.view(tokens, -1, head_dim)
    untouched = sorted(set(range(tokens + 3)) - set(slots.tolist()))
    for cached, own in ((keys, heads[:, num_heads:-kv_heads]), (values, heads[:, -kv_heads:])):
        assert (cached[untouched] == 99).all()
        expected = values_of(quantise_rows(own), kv_heads, head_dim)
        steps = own.float().nan_to_num(0.0, 0.0, 0.0).abs().amax(dim=-1, keepdim=True) / 127.0
        # A quotient halfway between two integers may go either way.
        difference = (values_of(cached[slots], kv_heads, head_dim) - expected).abs()
        assert ((difference < 1e-6) | (difference <= 1.001 * steps) | expected.isnan()).all()
        assert (difference > 1e-6).float().mean() < 1e-2
        assert torch.equal(values_of(cached[slots], kv_heads, head_dim).isnan(), expected.isnan())


def test_plain_placement_in_a_dtype_without_native_kernels() -> None:
    place = HeadPlacement(2, 2, 16, torch.float16, torch.device("cpu"))
    fused = torch.randn(3, 6 * 16, generator=torch.Generator().manual_seed(1)).half()
    keys, values = (torch.zeros(4, int8_row_width(2, 16), dtype=torch.int8) for _ in range(2))
    place(fused, None, None, torch.tensor([2, 0, 3]), keys, values)
    heads = fused.view(3, 6, 16)
    assert torch.equal(keys[[2, 0, 3]], quantise_rows(heads[:, 2:4]))
    assert torch.equal(values[[2, 0, 3]], quantise_rows(heads[:, 4:]))


@levels
def test_slots_outside_and_other_rows_are_refused(level: str) -> None:
    kernel = HeadRows(1, 1, 4, torch.float32, level=level)
    fused, rows = torch.randn(1, 12), torch.zeros(5, int8_row_width(1, 4), dtype=torch.int8)
    with pytest.raises(ValueError, match="slot"):
        kernel(fused, None, torch.tensor([5]), rows, rows.clone())
    with pytest.raises(AssertionError, match="not rows of the cache"):
        kernel(fused, None, torch.tensor([0]), rows, torch.zeros(5, 4))
    assert not rows.any()
