"""Rows of a cache of 8 bits: what rounding costs, its bad cases, and native rounding against plain PyTorch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from alignedserve.core.block_layout import FP8, BlockLayout
from kernels.activation import ACTIVATIONS
from kernels.cache_blocks import RANGE_BYTES, dequantise_blocks, parts_of, quantise_blocks
from kernels.cache_rows import (
    dequantise_float8_rows,
    dequantise_rows,
    int8_row_width,
    quantise_float8_rows,
    quantise_rows,
)
from kernels.cpu.native import vector_levels
from kernels.cpu.packed_linear import Int8Linear
from kernels.cpu.rows import HeadRows
from kernels.linear import Linear
from kernels.rotary import HeadPlacement
from tests.support.marks import each
from tests.support.models.tiny_engines import LogitsProbe, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

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


# Linear layers with weights of 8 bits.

WORKED_WEIGHT, WORKED_INPUT = torch.tensor([[0.5, -1.27]]), torch.tensor([[2.54, 1.27]])


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def test_the_worked_example() -> None:
    expected = (127 * 50 - 64 * 127) * 0.02 * 0.01
    assert float(Int8Linear(WORKED_WEIGHT)(WORKED_INPUT)) == pytest.approx(expected, abs=1e-5)


@each("dtype", [torch.float32, torch.bfloat16])
@each(("rows", "out_width", "in_width"), [(1, 1, 1), (3, 5, 7), (1, 64, 33), (70, 96, 129)])
def test_close_to_the_plain_product(dtype: torch.dtype, rows: int, out_width: int, in_width: int) -> None:
    weight, bias = normal(0, out_width, in_width, dtype=dtype), normal(1, out_width, dtype=dtype)
    x = normal(2, rows, in_width, dtype=dtype)
    result = Int8Linear(weight, bias)(x)
    assert (result.dtype, result.shape) == (dtype, (rows, out_width))
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    # Both operands are off by at most half a step of 1 / 127 of their largest number.
    largest = weight.abs().amax(1).double() * x.abs().amax(1, keepdim=True).double() * in_width
    assert ((result.double() - expected).abs() <= largest / 127 + expected.abs() / 128 + 1e-6).all()


@pytest.mark.parametrize("allow_native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_int8_already_keeps_its_bits(dtype: torch.dtype, allow_native: bool) -> None:
    weight = torch.randint(-128, 128, (37, 70), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    scales, bias = normal(1, 37).abs() + 0.1, normal(2, 37)
    x = torch.cat([torch.full((5, 1), 127.0), normal(3, 5, 69).mul(30).round()], dim=1).to(dtype)  # scale 1 in each row
    linear = Int8Linear(weight, bias, scales=scales, dtype=dtype, allow_native=allow_native)
    expected = x.double() @ weight.double().T * scales.double() + bias.double()
    result = linear(x)
    assert result.dtype == dtype
    assert ((result.double() - expected).abs() <= expected.abs() * (2.0**-8 if dtype == torch.bfloat16 else 1e-5)).all()


@each("dtype", [torch.float32, torch.bfloat16])
@each("activation", list(ACTIVATIONS))
def test_activations_follow_the_product(activation: str, dtype: torch.dtype) -> None:
    weight, bias, x = normal(0, 48, 32, dtype=dtype), normal(1, 48, dtype=dtype), normal(2, 5, 32, dtype=dtype)
    plain = ACTIVATIONS[activation](torch.nn.functional.linear(x.float(), weight.float(), bias.float()))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for packs in (True, False):
        linear = Linear(weight, bias, activation=activation, allow_packing=packs)
        assert relative_error(linear(x), plain) < tolerance
    assert relative_error(Int8Linear(weight, bias, activation=activation)(x), plain) < 0.03


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3", "gemma3_text"])
def test_logits_stay_close(family: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family)
    logits = []
    for quantization in (None, "int8"):
        probe = LogitsProbe(tiny_decoder(tmp_path, quantization=quantization), 4)
        probe.add("a", random_tokens(1, 30))
        probe.step(a=29)
        probe.step(a=1)
        logits.append(probe.logits("a"))
    assert 0.0 < relative_error(logits[1], logits[0]) < 0.05


# Blocks of 8 bits: what comes back, and what 8 bits cannot hold.


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


# Rows of a cache of FP8, in plain PyTorch: how far they are from what was stored.


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
