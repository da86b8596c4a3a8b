"""Families with GGUF entries and tensors of their own: logits against transformers' model that was converted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import UnsupportedModel
from alignedserve.gguf.file import GgufFile
from alignedserve.runtime.model.gguf.config import gguf_config
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.served_model import resolve_model
from tests.support.models.converted_gguf import write_converted
from tests.support.models.tiny_engines import logits_of, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

TOKENS = random_tokens(1, 41)
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_yarn_rope": {},
    "mixtral": {},
    "qwen3_moe": {"mlp_only_layers": []},
    "phi3": {},
    "phi3_long_rope": {},
    "granite": {},
}


def expected_logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


STEPS = (30, *[1] * 11)


@pytest.mark.parametrize("family", CASES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, family, **CASES[family])
    path = write_converted(tmp_path, model.config, tmp_path / "a.gguf")
    config, folders = read_config(path), read_config(tmp_path)
    assert (config.family, config.experts) == (folders.family, folders.experts)
    assert (config.sliding_window, config.windowed_layers) == (folders.sliding_window, folders.windowed_layers)
    expected = expected_logits(model)
    torch.testing.assert_close(
        logits_of(tiny_decoder(path), TOKENS, *STEPS), expected, rtol=0.0, atol=2e-5 * float(expected.abs().max())
    )


@pytest.mark.parametrize("family", ["mixtral", "phi3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_and_fused_tensors_in_blocks(family: str, dtype: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, family)
    path = write_converted(tmp_path, model.config, tmp_path / "a.gguf", "Q8_0")
    expected = expected_logits(model)
    errors = (logits_of(tiny_decoder(path, dtype), TOKENS, *STEPS).float() - expected).square().mean(
        -1
    ).sqrt() / expected.std()
    assert float(errors.median()) < 0.08  # a token whose experts are nearly as likely as others may choose otherwise


def test_a_step_reads_the_experts_that_a_token_chooses(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "mixtral")
    path = write_converted(tmp_path, model.config, tmp_path / "a.gguf", "Q8_0")
    stored = resolve_model(ModelSectionConfig(path=str(path), dtype="float32")).stored
    assert stored is not None
    matrices = [tensor for tensor in GgufFile(path).tensors.values() if len(tensor.shape) > 1]
    expected = {tensor.name: tensor.num_bytes for tensor in matrices if tensor.name != "token_embd.weight"}
    assert stored.step_bytes == sum(
        num_bytes * 2 // 5 if "_exps" in name else num_bytes for name, num_bytes in expected.items()
    )


def test_granite_without_positions(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "granite")
    path = write_converted(tmp_path, model.config, tmp_path / "a.gguf", rope__scaling__finetuned=False)
    with pytest.raises(UnsupportedModel, match="without rotary positions"):
        gguf_config(GgufFile(path))
