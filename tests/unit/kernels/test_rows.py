"""Native operations on rows, every level of them that runs here, against float64. Skipped where they are not built."""

import pytest
import torch
from torch import Tensor

from kernels import activation, rotary, sampling
from kernels.activation import Gated, LayerNorm, Norm, RmsNorm, gated, rms_norm
from kernels.cpu import rows
from kernels.cpu.native import vector_levels
from kernels.cpu.rows import GateRows, HeadRows, NormRows, highest, native_level
from kernels.rotary import HeadPlacement, rotary_angles, rotate_
from tests.support.marks import slow

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}

BUILT = vector_levels() if native_level(torch.float32, CPU) else ()
levels = pytest.mark.parametrize("level", BUILT or [pytest.param("", marks=pytest.mark.skip("not built"))])
dtypes = pytest.mark.parametrize("dtype", list(ROUNDING))
widths = pytest.mark.parametrize("width", [1, 17, 64, 1000, *slow(3, 15, 16, 100, 768)])


def randoms(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def strided(x: Tensor) -> Tensor:
    """Return the same rows inside wider ones that hold NaN."""
    wide = torch.full((x.shape[0], x.shape[1] + 5), float("nan"), dtype=x.dtype)
    wide[:, 2:-3] = x
    return wide[:, 2:-3]


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    limit = ROUNDING[dtype] * (expected.abs() + 1.0)
    return bool(((actual.double() - expected).abs() <= limit).all())


def expected_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, is_rms: bool) -> Tensor:
    x = x.double()
    centred = x if is_rms else x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return scaled if bias is None else scaled + bias.double()


@levels
@dtypes
@widths
@pytest.mark.parametrize("is_rms", [True, False])
def test_norms(is_rms: bool, width: int, dtype: torch.dtype, level: str) -> None:
    weight, bias = randoms(width, dtype=dtype), None if is_rms else randoms(width, dtype=dtype, seed=1)
    kernel = NormRows(weight, bias, 1e-5, is_rms=is_rms, level=level)
    x, residual = strided(randoms(7, width, dtype=dtype) * 3 + 1), strided(randoms(7, width, dtype=dtype, seed=2))
    assert close(kernel(x), expected_norm(x, weight, bias, 1e-5, is_rms=is_rms), dtype)
    summed = residual + x
    before = x.clone()
    normed = kernel(x, residual)
    assert torch.equal(residual, summed)
    assert torch.equal(x, before)
    assert close(normed, expected_norm(summed, weight, bias, 1e-5, is_rms=is_rms), dtype)


@levels
@pytest.mark.parametrize("width", [17, 64])
def test_a_weight_may_be_more_precise_than_the_rows(width: int, level: str) -> None:
    weight = 1.0 + randoms(width, dtype=torch.float32) * 1e-3
    x = strided(randoms(7, width, dtype=torch.bfloat16))
    kernel = NormRows(weight, None, 1e-5, is_rms=True, level=level, dtype=torch.bfloat16)
    expected = expected_norm(x, weight, None, 1e-5, is_rms=True)
    assert kernel(x).dtype == torch.bfloat16
    assert close(kernel(x), expected, torch.bfloat16)
    assert torch.equal(RmsNorm(weight, 1e-5, torch.bfloat16)(x), kernel(x))
    assert close(rms_norm(x, weight, 1e-5), expected, torch.bfloat16)


@levels
@dtypes
@pytest.mark.parametrize("num_rows", [1, 2, 301])
def test_many_rows_are_divided(num_rows: int, dtype: torch.dtype, level: str) -> None:
    weight = randoms(1024, dtype=dtype)
    x = randoms(num_rows, 1024, dtype=dtype)
    kernel = NormRows(weight, None, 1e-6, is_rms=True, level=level)
    alone = torch.cat([kernel(x[row : row + 1]) for row in range(num_rows)])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(kernel(x), alone)
    finally:
        torch.set_num_threads(before)


@levels
@dtypes
@widths
@pytest.mark.parametrize("name", GateRows.ACTIVATIONS)
def test_gates(name: str, width: int, dtype: torch.dtype, level: str) -> None:
    x = randoms(5, 2 * width, dtype=dtype) * 4
    x[0, 0], x[1, 0], x[2, 0] = 95.0, -95.0, -200.0
    expected = gated(x.double(), name)
    assert close(GateRows(name, dtype, level=level)(x), expected, dtype)
    x[3, :width] = float("nan")
    assert GateRows(name, dtype, level=level)(x)[3].isnan().all()


@levels
@dtypes
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 20), (7, 6), (128, 128), (24, 0)])
def test_heads_are_rotated_and_placed(head_dim: int, rotary_dim: int, dtype: torch.dtype, level: str) -> None:
    num_heads, kv_heads, count = 6, 2, 9
    width = (num_heads + 2 * kv_heads) * head_dim
    fused = strided(randoms(count, width, dtype=dtype))
    rotation = None
    expected = fused.double().view(count, -1, head_dim)
    if rotary_dim:
        frequencies = torch.linspace(0.01, 1.0, rotary_dim // 2)
        rotation = rotary_angles(torch.arange(count) * 7, frequencies, torch.float32)
        rotate_(expected[:, : num_heads + kv_heads], rotation[0].double(), rotation[1].double())
    slots = torch.randperm(20)[:count]
    keys, values = (torch.full((20, kv_heads * head_dim), float("nan"), dtype=dtype) for _ in range(2))
    HeadRows(num_heads, kv_heads, head_dim, dtype, level=level)(fused, rotation, slots, keys, values)
    expected = expected.flatten(1)
    first_key, first_value = num_heads * head_dim, (num_heads + kv_heads) * head_dim
    assert close(fused, expected, dtype)
    assert torch.equal(keys[slots], fused[:, first_key:first_value])
    assert torch.equal(values[slots], fused[:, first_value:])
    others = [slot for slot in range(20) if slot not in slots.tolist()]
    assert keys[others].isnan().all()
    assert values[others].isnan().all()


@levels
def test_slots_outside_are_refused(level: str) -> None:
    kernel = HeadRows(1, 1, 4, torch.float32, level=level)
    keys, values = torch.zeros(5, 4), torch.zeros(5, 4)
    for slot in (-1, 5):
        with pytest.raises(ValueError, match="slot"):
            kernel(torch.ones(2, 12), None, torch.tensor([0, slot]), keys, values)
    assert not keys.any()


@levels
@dtypes
@pytest.mark.parametrize("width", [1, 5, 16, 63, 64, 65, 1000, 50272])
def test_the_first_of_the_highest(width: int, dtype: torch.dtype, level: str) -> None:
    x = strided(randoms(6, width, dtype=dtype) - 10.0)  # below 0: past a row's end nothing may count
    x[1, width // 2 :] = 5.0
    x[2] = -float("inf")
    x[3, width - 1] = float("nan")
    x[4, width - 1] = float("inf")
    indices, values = highest(x, level=level)
    assert values[3].isnan()
    for row in (0, 1, 2, 4, 5):
        assert values[row] == x[row].max()
        assert indices[row] == (x[row] == x[row].max()).nonzero()[0]


def test_plain_forms_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions without the extension, and on another device, compute the same."""

    def everything() -> list[Tensor]:
        x, residual = randoms(6, 48, dtype=torch.float32), randoms(6, 48, dtype=torch.float32, seed=1)
        weight, bias = randoms(48, dtype=torch.float32), randoms(48, dtype=torch.float32, seed=1)
        norms: tuple[Norm, ...] = (LayerNorm(weight, bias, 1e-5), RmsNorm(weight, 1e-6))
        results = [result for norm in norms for result in (norm(x), norm.after_adding_(residual, x), residual.clone())]
        results.append(Gated("silu", x.dtype, CPU)(x.clone()))
        keys, values = torch.zeros(10, 8), torch.zeros(10, 8)
        place = HeadPlacement(4, 1, 8, x.dtype, CPU)
        rotation = rotary_angles(torch.arange(6), torch.linspace(0.1, 1.0, 4), place.angle_dtype)
        place(x, None, rotation, torch.tensor([3, 1, 9, 0, 4, 7]), keys, values)
        token_ids, is_usable = sampling.greedy(residual)
        return [*results, x, keys, values, token_ids, is_usable]

    native = everything()
    for module in (activation, rotary, sampling):
        monkeypatch.setattr(module, "native_level", lambda dtype, device: None)
    for one, other in zip(native, everything(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_where_native_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    best = BUILT[0] if BUILT else None
    assert native_level(torch.bfloat16, CPU) == best
    assert native_level(torch.float16, CPU) is None
    assert native_level(torch.float32, torch.device("cuda")) is None
    monkeypatch.setattr(rows, "_native", None)
    assert native_level(torch.float32, CPU) is None
