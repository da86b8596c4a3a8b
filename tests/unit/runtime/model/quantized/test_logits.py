"""Logits of quantised checkpoints against transformers with the values that the files stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.model_files import quantized_weights, read_config
from alignedserve.runtime.model.quantized.layout import Computing
from alignedserve.runtime.model.weights import feed_forward_weights
from kernels.float8_linear import Float8Linear
from kernels.linear import Linear
from tests.support.marks import slow
from tests.support.models.gpu_weights import weights_as_on_a_gpu
from tests.support.models.quantized_checkpoints import FORMATS, quantize_folder, unpacked_decoder
from tests.support.models.tiny_engines import logits_of, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

DEFAULT_FORMATS = (
    "w8a8",
    "w4a16 with zero points",
    "fp8 static, by tensor",
    "awq",
    "gptq desc_act",
    "gptq of 8 bits",
    "nvfp4 of modelopt",
)
TOKENS = random_tokens(1, 23)
TRIED = ("gpt_neox", "qwen3_moe", *slow("llama_mha", "qwen2", "phi3", "opt", "gemma3_text", "mixtral"))


def made(folder: Path, family: str, name: str) -> Tensor:
    """Write a quantised checkpoint; return the logits of transformers from its values."""
    model: Any = make_tiny_model(folder, family)
    values = quantize_folder(folder, FORMATS[name])
    fused = "experts.gate_up_proj"  # as transformers holds experts; they are loaded from the rewritten folder instead
    if any(fused in key for key in model.state_dict()):
        return _logits(_reloaded(model, values, folder / "plain"))
    model.load_state_dict(values, strict=False)
    return _logits(model)


def _reloaded(model: Any, values: dict[str, Tensor], plain: Path) -> Any:
    model.config.save_pretrained(plain)
    save_file({name: value.clone() for name, value in values.items()}, plain / "model.safetensors", {"format": "pt"})
    return type(model).from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(torch.tensor([TOKENS])).logits[0]
    return logits


def error(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", [*DEFAULT_FORMATS, *slow(*sorted(FORMATS.keys() - set(DEFAULT_FORMATS)))])
def test_every_format(name: str, tmp_path: Path) -> None:
    expected = made(tmp_path, "llama", name)
    assert float((logits_of(unpacked_decoder(tmp_path), TOKENS) - expected).abs().max() / expected.abs().max()) < 1e-5
    # Inputs are rounded to 8 bits; nothing else is.
    assert error(logits_of(tiny_decoder(tmp_path), TOKENS), expected) < 0.03
    assert error(logits_of(tiny_decoder(tmp_path, "bfloat16"), TOKENS), expected) < 0.04


@pytest.mark.parametrize("name", ["gptq desc_act, different orders", *slow("w8a8", "fp8", "awq")])
@pytest.mark.parametrize("family", TRIED)
def test_every_family(family: str, name: str, tmp_path: Path) -> None:
    expected = made(tmp_path, family, name)
    assert float((logits_of(unpacked_decoder(tmp_path), TOKENS) - expected).abs().max() / expected.abs().max()) < 1e-5
    # Near a tie, rounded inputs make a router choose other experts.
    assert error(logits_of(tiny_decoder(tmp_path), TOKENS), expected) < (0.2 if family == "mixtral" else 0.03)


@pytest.mark.parametrize("name", ["fp8", "fp8 static, by tensor"])
def test_products_in_fp8(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that multiplies FP8: a CPU computes the same product."""
    expected = made(tmp_path, "llama_mha", name)
    weights = weights_as_on_a_gpu(tmp_path, monkeypatch, torch.bfloat16, has_float8=True)
    assert all(isinstance(product, Float8Linear) for product in weights.layer_projections)
    assert error(logits_of(Decoder(read_config(tmp_path), weights), TOKENS), expected) < 0.1


@pytest.mark.parametrize(
    "name",
    [
        "fp8 in blocks",
        "gptq desc_act, different orders",
        "w8a16",
        "nvfp4",
        *slow("awq", "fp8", "w8a8", "nvfp4 of modelopt"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_weights_stay_packed_on_a_gpu(family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts too. Inputs are not rounded."""
    expected = made(tmp_path, family, name)
    monkeypatch.delattr(feed_forward_weights, "stacked_experts")  # as they would be unpacked
    weights = weights_as_on_a_gpu(tmp_path, monkeypatch, torch.float32, has_float8=False)
    config = read_config(tmp_path)
    assert all(not isinstance(product, Linear) for product in weights.layer_projections)
    assert error(logits_of(Decoder(config, weights), TOKENS), expected) < 1e-5
    computing = Computing("cuda:0", "float32")
    assert quantized_weights(tmp_path, config, computing).warning is None


@pytest.mark.parametrize("name", ["w8a16", "fp8 in blocks"])
def test_experts_without_gates_stay_packed_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path, "nemotron_h", moe_intermediate_size=64)
    quantize_folder(tmp_path, FORMATS[name])
    expected = logits_of(unpacked_decoder(tmp_path), TOKENS)
    monkeypatch.delattr(feed_forward_weights, "stacked_experts")
    weights = weights_as_on_a_gpu(tmp_path, monkeypatch, torch.float32, has_float8=False)
    assert error(logits_of(Decoder(read_config(tmp_path), weights), TOKENS), expected) < 1e-5
