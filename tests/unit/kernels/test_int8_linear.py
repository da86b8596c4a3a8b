"""Linear layers with weights of 8 bits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ConfigError, ModelError
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.model.hf_config import read_model_config
from alignedserve.runtime.model.weight_loader import assemble_weights
from kernels.activation import ACTIVATIONS
from kernels.cpu.int8_linear import Int8Linear
from kernels.linear import Linear
from tests.support.marks import each
from tests.support.tiny_engines import LogitsProbe, random_tokens, tiny_decoder
from tests.support.tiny_models import make_tiny_model

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    linear = Int8Linear(normal(0, 40, 50, dtype=dtype))
    x = normal(1, 9, 50, dtype=dtype)
    x[3] *= 1000.0
    together = linear(x)
    for row in range(9):
        assert torch.equal(linear(x[row : row + 1]), together[row : row + 1])


def test_zeros_stay_zeros() -> None:
    assert torch.equal(Int8Linear(torch.zeros(4, 6))(normal(0, 2, 6)), torch.zeros(2, 4))
    assert torch.equal(Int8Linear(normal(0, 4, 6))(torch.zeros(2, 6)), torch.zeros(2, 4))


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


def test_experts_stay_close(tmp_path: Path) -> None:
    """Token by token: where two experts have nearly the same share, rounding chooses the other one."""
    make_tiny_model(tmp_path, "mixtral")
    logits = []
    for quantization in (None, "int8"):
        probe = LogitsProbe(tiny_decoder(tmp_path, quantization=quantization), 4)
        probe.add("a", random_tokens(1, 30))
        probe.step(a=30)
        logits.append(probe.logits("a"))
    errors = sorted(relative_error(found, plain) for plain, found in zip(*logits, strict=True))
    assert 0.0 < errors[15] < 0.05


class _Broken:
    """Weights among which one is not a number."""

    def has(self, name: str) -> bool:
        return name.startswith("model.")

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        values = torch.ones(shape)
        if name.endswith("o_proj.weight"):
            values[0, 0] = float("nan")
        return values


def test_what_does_not_pack_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    config = read_model_config(tmp_path)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.o_proj cannot be packed with 8 bits: .*not finite"):
        assemble_weights(config, _Broken(), "int8")
    assert isinstance(Decoder(config, assemble_weights(config, _Broken())), Decoder)


def test_other_quantizations_are_refused() -> None:
    with pytest.raises(ConfigError, match="quantization"):
        ModelSectionConfig(quantization="int3")
