"""Linear layers with weights of FP8, on a CPU, whose `torch._scaled_mm` computes the same."""

import pytest
import torch
from torch import Tensor

from kernels.activation import ACTIVATIONS
from kernels.float8_linear import Float8Linear, has_float8_products


def made(columns: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(columns, width, generator=generator).mul(100.0).to(torch.float8_e4m3fn)
    return weight, torch.rand(columns, generator=generator) * 1e-3


def test_the_worked_example() -> None:
    weight = torch.zeros(16, 16)
    weight[0, :2] = torch.tensor([2.0, 1.0])
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([0.5, -224.0])
    linear = Float8Linear(weight.to(torch.float8_e4m3fn), torch.full((16,), 0.25), dtype=torch.float32)
    assert float(linear(x)[0, 0]) == pytest.approx(-55.75, rel=2.0**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_gated", [False, True])
def test_close_to_the_product_in_float64(is_gated: bool, dtype: torch.dtype) -> None:
    weight, scales = made(64, 96)
    x, bias = torch.randn(7, 96, generator=torch.Generator().manual_seed(1)).to(dtype), torch.ones(64)
    linear = Float8Linear(weight, scales, bias, dtype=dtype, activation="silu", is_gated=is_gated)
    expected = x.double() @ weight.double().T * scales.double() + 1.0
    halves = expected.chunk(2, dim=1)
    activation = ACTIVATIONS["silu"]
    expected = activation(halves[0]) * halves[1] if is_gated else activation(expected)
    result = linear(x)
    assert (result.dtype, result.shape) == (dtype, expected.shape)
    assert float((result.double() - expected).norm() / expected.norm()) < 0.05  # 3 bits of every input


def test_only_gpus_have_them() -> None:
    assert not has_float8_products("cpu")
