"""Products with weights of 4 and 8 bits in groups, against float64, by the kernel and without it."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import gpu_dispatch
from kernels.block_formats import dequantize, grouped_blocks
from kernels.grouped_linear import UNPACKING_ROWS, GroupedLinear, GroupedWeight, Numbers, SortedLinear, rows_by_expert
from tests.support.block_weights import random_blocks
from tests.support.marks import slow

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

# One rounding of the result, relative; Triton's interpreter cuts bfloat16 off where a GPU rounds.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


_SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
FLOATS_OF_4_BITS = torch.cat((_SIZES, -_SIZES))


@dataclass(frozen=True, slots=True)
class Sample:
    """A weight, and what it stands for."""

    weight: GroupedWeight
    values: Tensor  # float64


def sample(numbers: Numbers, group: int, *shape: int) -> Sample:
    """Draw a weight of `shape` [.., columns, groups]."""
    if not numbers.are_whole and numbers is not Numbers.FLOAT8:
        return sample_of_float4(numbers, group, *shape)
    scales = torch.rand(shape) / 8
    zeros = torch.randint(0, 17 if numbers is Numbers.INT4 else 256, shape)
    if numbers is Numbers.FLOAT8:
        stored = torch.randint(0, 0x7F, (*shape, group), dtype=torch.uint8)
        stored |= torch.randint(0, 2, stored.shape, dtype=torch.uint8) << 7
        values = stored.view(torch.float8_e4m3fn).double() * scales[..., None].double()
        return Sample(GroupedWeight(numbers, stored.flatten(-2), scales, None), values.flatten(-2))
    drawn = torch.randint(0, 16 if numbers is Numbers.INT4 else 256, (*shape, group), dtype=torch.uint8)
    half = group // 2
    words = drawn[..., :half] | drawn[..., half:] << 4 if numbers is Numbers.INT4 else drawn
    values = (drawn.double() - zeros[..., None].double()) * scales[..., None].double()
    weight = GroupedWeight(numbers, words.flatten(-2), scales, zeros.to(torch.uint8))
    return Sample(weight, values.flatten(-2))


def sample_of_float4(numbers: Numbers, group: int, *shape: int) -> Sample:
    drawn = torch.randint(0, 16, (*shape, group), dtype=torch.uint8)
    if numbers is Numbers.MXFP4:
        half, exponents = group // 2, torch.randint(-9, -2, shape)
        words = (drawn[..., :half] | drawn[..., half:] << 4).flatten(-2)
        values = FLOATS_OF_4_BITS[drawn.long()] * torch.exp2(exponents.double())[..., None]
        return Sample(GroupedWeight(numbers, words, (exponents + 127).to(torch.uint8), None), values.flatten(-2))
    pairs = drawn.view(*shape[:-1], -1, 2, 16)
    scales, factors = torch.randint(0x20, 0x50, pairs.shape[:-1], dtype=torch.uint8), torch.rand(shape[:-1])
    sizes = scales.view(torch.float8_e4m3fn).double() * factors[..., None, None].double()
    values = FLOATS_OF_4_BITS[pairs.long()] * sizes[..., None]
    words = (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2)
    return Sample(GroupedWeight(numbers, words, scales.flatten(-2), None, factors), values.flatten(-3))


def moved(weight: GroupedWeight, device: torch.device) -> GroupedWeight:
    return weight.changed(lambda part: part.to(device))


def check(found: Tensor, x: Tensor, values: Tensor, *, has_kernel: bool, added: float | Tensor = 0.0) -> None:
    """Compare products with those in float64. Roundings are relative to what is added up."""
    expected = x.double().cpu() @ values.mT + added
    size = x.double().cpu().abs() @ values.abs().mT
    dtype = found.dtype
    unpacking = 0.0 if has_kernel else ROUNDING[dtype] / 2  # each weight by half a unit, all to one side at worst
    limit = ROUNDING[dtype] * (expected.abs() + 1.0) * 2 + (unpacking + 1e-7) * size
    assert ((found.double().cpu() - expected).abs() <= limit).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *slow(torch.float16)])
@pytest.mark.parametrize(
    ("num_rows", "group", "groups", "columns"),
    [(1, 128, 8, 70), (16, 32, 3, 64), (17, 64, 5, 130), (40, 32, 2, 16), (70, 32, 9, 16)],
)
@pytest.mark.parametrize("numbers", list(Numbers))
@pytest.mark.parametrize("has_kernel", [True, False])
def test_products(
    num_rows: int,
    group: int,
    groups: int,
    columns: int,
    numbers: Numbers,
    has_kernel: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: has_kernel)
    made = sample(numbers, group, columns, groups)
    bias = torch.randn(columns).to(dtype)
    x = torch.randn(num_rows, group * groups + 8).to(device, dtype)[:, 4:-4]
    multiply = GroupedLinear(moved(made.weight, device), bias.to(device), dtype=dtype)
    assert (multiply.in_width, multiply.out_width) == (group * groups, columns)
    check(multiply(x), x, made.values, has_kernel=has_kernel, added=bias.double())


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("numbers", list(Numbers))
@pytest.mark.parametrize(("group", "groups", "columns"), [(128, 3, 40), (32, 2, 64)])
def test_products_of_many_rows_are_of_the_unpacked_weight(
    group: int,
    groups: int,
    columns: int,
    numbers: Numbers,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: True)
    made = sample(numbers, group, columns, groups)
    multiply = GroupedLinear(moved(made.weight, device), dtype=dtype)
    expected = made.weight.unpacked(dtype).to(device)
    torch.testing.assert_close(multiply.unpacked(), expected, rtol=ROUNDING[dtype], atol=0.0)
    x = torch.randn(UNPACKING_ROWS + 1, group * groups).to(device, dtype)
    assert torch.equal(multiply(x), functional.linear(x, multiply.unpacked()))
    check(multiply(x), x, made.values, has_kernel=False)


@pytest.mark.parametrize("num_rows", [1, 40, UNPACKING_ROWS + 1])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q6_K", "Q4_0", "Q4_K", "MXFP4", *slow("Q4_1", "G4_64")])
def test_blocks_of_files(type_name: str, num_rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With minima, and in groups of 16."""
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: True)
    raw = random_blocks(type_name, 70, 512)
    x = torch.randn(num_rows, 512, device=device)
    multiply = GroupedLinear(moved(grouped_blocks(raw, type_name), device), dtype=torch.float32)
    check(multiply(x), x, dequantize(raw, type_name).double(), has_kernel=num_rows <= UNPACKING_ROWS)


def test_a_head_is_not_unpacked_for_many_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: True)
    made = sample(Numbers.INT4, 32, 40, 2)
    multiply = GroupedLinear(moved(made.weight, device), dtype=torch.float32, has_few_rows=True)
    monkeypatch.delattr(GroupedLinear, "unpacked")
    x = torch.randn(UNPACKING_ROWS + 1, 64, device=device)
    check(multiply(x), x, made.values, has_kernel=True)


def test_every_number_of_fp8_is_exact(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: True)
    stored = torch.arange(256, dtype=torch.uint8)
    stored[[0x7F, 0xFF]] = 0  # not numbers; files with those are refused
    rows = torch.zeros(256, 32, dtype=torch.uint8)
    rows[:, 5] = stored
    multiply = GroupedLinear(
        moved(GroupedWeight(Numbers.FLOAT8, rows, torch.ones(256, 1), None), device), dtype=torch.float32
    )
    x = torch.zeros(1, 32, device=device)
    x[0, 5] = 1.0
    assert torch.equal(multiply(x)[0].cpu(), stored.view(torch.float8_e4m3fn).float())


def test_every_float_of_4_bits_and_every_scale_is_exact(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By products and unpacked, with the kernel and without, but for scales whose largest values float32 has not."""
    exponents = torch.arange(252, dtype=torch.uint8)
    words = torch.arange(16, dtype=torch.uint8).repeat(len(exponents), 1)  # inputs 0 to 15; those behind are 0
    weight = moved(GroupedWeight(Numbers.MXFP4, words, exponents[:, None], None), device)
    expected = FLOATS_OF_4_BITS * torch.exp2(exponents.double() - 127)[:, None]
    for has_kernel in (True, False):
        monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device, has=has_kernel: has)
        multiply = GroupedLinear(weight, dtype=torch.float32)
        assert torch.equal(multiply(torch.eye(32, device=device)[:16]).T.cpu(), expected.float())
        assert torch.equal(multiply.unpacked()[:, :16].cpu(), expected.float())


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
@pytest.mark.parametrize("numbers", list(Numbers))
@pytest.mark.parametrize(("num_rows", "num_experts", "chosen"), [(1, 4, 1), (7, 5, 2), (90, 3, 2)])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_rows_sorted_by_expert_meet_their_experts(
    num_rows: int,
    num_experts: int,
    chosen: int,
    numbers: Numbers,
    has_kernel: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: has_kernel)
    made = sample(numbers, 32, num_experts, 40, 2)
    experts = torch.rand(num_rows, num_experts, device=device).argsort(1)[:, :chosen]
    rows = rows_by_expert(experts, num_experts)
    x = torch.randn(num_rows * chosen, 64).to(device, dtype)
    bias = torch.randn(num_experts, 40).to(dtype)
    found = SortedLinear(moved(made.weight, device), None, bias.to(device), dtype=dtype)(x, rows)
    for row, expert in enumerate(experts.flatten().sort().values.tolist()):
        own = slice(row, row + 1)
        check(found[own], x[own], made.values[expert], has_kernel=has_kernel, added=bias[expert].double())


def test_gates_come_after_the_product(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: True)
    weight = moved(sample(Numbers.INT4, 32, 64, 2).weight, device)
    multiply = GroupedLinear(weight, dtype=torch.float32, activation="silu", is_gated=True)
    x = torch.randn(3, 64, device=device)
    gates, ups = (x @ multiply.unpacked().T).chunk(2, dim=1)
    torch.testing.assert_close(multiply(x), gates * torch.sigmoid(gates) * ups, rtol=1e-4, atol=1e-4)
