"""Kernels that do several steps of PyTorch in one pass, against those steps in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import ACTIVATIONS, gated
from kernels.cache_rows import quantise_float8_rows
from kernels.rotary import HeadNorms, rotary_angles, rotate_
from kernels.sampling import mask_tokens_
from tests.support.marks import slow

pytest.importorskip("triton")

from kernels.gpu.allowed_tokens import mask_tokens_ as mask_by_kernel_
from kernels.gpu.gating import NAMES, Gates
from kernels.gpu.head_placement import HeadRowsKernel
from kernels.gpu.row_norm import RowNorm

pytestmark = pytest.mark.slow

# Of one rounding, relative; Triton's interpreter cuts bfloat16 off where a GPU rounds.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32, torch.float16)])


def randoms(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def strided(x: Tensor) -> Tensor:
    """Return the same rows inside wider ones that hold NaN."""
    wide = torch.full((x.shape[0], x.shape[1] + 5), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, 2:-3] = x
    return wide[:, 2:-3]


def check_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    limit = roundings * ROUNDING[dtype] * (expected.abs() + 1.0)
    assert ((actual.double() - expected).abs() <= limit).all()


def expected_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_rms: bool) -> Tensor:
    shape = tuple(weight.shape)
    if is_rms:
        return functional.rms_norm(x.double(), shape, weight.double(), 1e-5)
    return functional.layer_norm(x.double(), shape, weight.double(), None if bias is None else bias.double(), 1e-5)


@dtypes
@pytest.mark.parametrize(("num_rows", "width"), [(5, 64), (1, 1), (3, 100), (2, 1000), (0, 8)])
@pytest.mark.parametrize("kind", ["rms", "rms, precise weight", "layer", "layer without bias"])
def test_norms(kind: str, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    weight = randoms(width, dtype=torch.float32 if "precise" in kind else dtype, device=device)
    bias = randoms(width, dtype=dtype, device=device, seed=1) if kind == "layer" else None
    norm = RowNorm(weight, bias, 1e-5, is_rms="rms" in kind)
    x = strided(randoms(num_rows, width, dtype=dtype, device=device) * 3 + 1)
    residual = strided(randoms(num_rows, width, dtype=dtype, device=device, seed=2))
    roundings = 3 if "rms" in kind else 1
    check_close(norm(x), expected_norm(x, weight, bias, is_rms="rms" in kind), dtype, roundings)
    summed, before = residual.double() + x.double(), x.clone()
    normed = norm(x, residual)
    check_close(residual, summed, dtype)
    assert torch.equal(x, before)
    check_close(normed, expected_norm(residual, weight, bias, is_rms="rms" in kind), dtype, roundings)


@dtypes
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_rows", "width"), [(3, 1025), (1, 1), (4, 96), (0, 8)])
def test_gates(num_rows: int, width: int, name: str, dtype: torch.dtype, device: torch.device) -> None:
    x = strided(randoms(num_rows, 2 * width, dtype=dtype, device=device) * 4)
    if num_rows == 3:
        x[0, 0], x[1, 0], x[2, 0] = 95.0, -95.0, -200.0
    expected = gated(x.double(), name)
    check_close(Gates(name)(x), expected, dtype, 3)
    if num_rows > 1:
        x[1, :width] = float("nan")
        assert Gates(name)(x)[1].isnan().all()


def test_every_activation_has_its_gates() -> None:
    assert set(NAMES) == {*ACTIVATIONS, "clamped_silu"} - {"relu2"}  # which nothing has gates with


@dtypes
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim", "rotary_dim", "count"),
    [
        (4, 4, 64, 64, 3),
        (6, 2, 80, 20, 9),
        (8, 1, 96, 0, 2),
        (14, 2, 128, 128, 1),
        (5, 1, 7, 6, 4),
        (1, 1, 64, 64, 0),
    ],
)
def test_heads_are_placed(
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    count: int,
    has_norm: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    fused = strided(randoms(count, (num_heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device) * 2)
    heads = fused.double().view(count, num_heads + 2 * kv_heads, head_dim)
    queries, new_keys, new_values = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    norm = rotation = None
    if has_norm:
        weights = [randoms(head_dim, dtype=dtype, device=device, seed=seed) for seed in (3, 4)]
        norm = HeadNorms(weights[0], weights[1], 1e-5)
        queries, new_keys = (
            expected_norm(heads, weight, None, is_rms=True)
            for heads, weight in zip((queries, new_keys), weights, strict=True)
        )
    expected = torch.cat((queries, new_keys, new_values), dim=1)
    if rotary_dim:
        frequencies = torch.linspace(0.01, 1.0, rotary_dim // 2, device=device)
        rotation = rotary_angles(torch.arange(count, device=device) * 7, frequencies, torch.float32)
        rotate_(expected[:, : num_heads + kv_heads], rotation[0].double(), rotation[1].double())
    slots = torch.randperm(20)[:count].to(device)
    nowhere = torch.full((20, kv_heads * head_dim), float("nan"), dtype=dtype, device=device)
    keys, values = nowhere.clone(), nowhere.clone()
    before = fused.clone()
    HeadRowsKernel(num_heads, kv_heads, head_dim)(fused, norm, rotation, slots, keys, values)
    first_key, first_value = num_heads * head_dim, (num_heads + kv_heads) * head_dim
    check_close(fused, expected.flatten(1), dtype, 4 if has_norm else 1)
    assert torch.equal(keys[slots], fused[:, first_key:first_value])
    assert torch.equal(values[slots], fused[:, first_value:])
    rounded = [torch.full((20, kv_heads * (head_dim + 4)), 255, dtype=torch.uint8, device=device) for _ in range(2)]
    if count and head_dim % 4 == 0:  # scales are read as whole words
        HeadRowsKernel(num_heads, kv_heads, head_dim)(before.clone(), norm, rotation, slots, *rounded)
        for own, plain in zip(rounded, (keys, values), strict=True):
            exact, width = quantise_float8_rows(plain[slots].view(-1, kv_heads, head_dim)), kv_heads * head_dim
            scales, exact_scales = (one[:, width:].clone().view(torch.float32) for one in (own[slots], exact))
            torch.testing.assert_close(scales, exact_scales, rtol=1e-6, atol=0.0)
            # A quotient half-way between two.
            assert (own[slots][:, :width].int() - exact[:, :width].int()).abs().le(1).all()
    others = [slot for slot in range(20) if slot not in slots.tolist()]
    assert keys[others].isnan().all()
    assert values[others].isnan().all()


@dtypes
def test_masks_of_tokens(dtype: torch.dtype, device: torch.device) -> None:
    """Rows of any order, a vocabulary of a part of a word, every bit; rows without a mask stay."""
    vocabulary, rows = 4133, torch.tensor([4, 0, 2], device=device)
    logits = strided(randoms(5, vocabulary, dtype=dtype, device=device))
    bits = torch.randint(-(2**31), 2**31, (3, 130), generator=torch.Generator().manual_seed(1)).to(device, torch.int32)
    bits[1], bits[2] = -1, 0
    expected = logits.float()
    mask_tokens_(expected, rows, bits)
    mask_by_kernel_(logits, rows, bits)
    assert torch.equal(logits.float(), expected)
    assert torch.equal(expected[0].isinf(), torch.zeros(vocabulary, dtype=torch.bool, device=device))
