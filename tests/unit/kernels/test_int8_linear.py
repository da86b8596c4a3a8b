"""Linear layers with weights of 8 bits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.activation import ACTIVATIONS
from kernels.cpu.packed_linear import Int8Linear
from kernels.linear import Linear
from tests.support.marks import each
from tests.support.models.tiny_engines import LogitsProbe, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

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
