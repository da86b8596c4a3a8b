"""Folders that `alignedserve quantize` writes: what they hold, how they are computed, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ConfigError, UnsupportedModel
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.quantizing import FORMS, quantize_folder
from alignedserve.runtime.model.served_model import resolve_model
from kernels.linear import Linear
from tests.support.models.gpu_weights import weights_as_on_a_gpu
from tests.support.models.quantized_checkpoints import unpacked_decoder, unpacked_source
from tests.support.models.tiny_engines import logits_of, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

TOKENS = random_tokens(3, 17)
# Of weights: 8 bits, 4 bits with a minimum, floats of 4 bits.
ERRORS = {"int8": 0.007, "q4_k": 0.09, "mxfp4": 0.13}


def written(folder: Path, form: str) -> Path:
    output = folder / form
    quantize_folder(folder, output, form, lambda done, whole: None)
    return output


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", {"hidden_size": 256}), ("qwen3_moe", {"moe_intermediate_size": 64})]
)
def test_rounded_weights_are_near_and_computed_packed(
    family: str, sizes: dict[str, int], form: str, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path, family, **sizes)
    output = written(tmp_path, form)
    source = unpacked_source(output)
    before = load_file(tmp_path / "model.safetensors")
    rounded = [name for name in before if name.endswith("proj.weight") and ".layers.0." in name]
    assert rounded
    for name in rounded:
        values = source.tensor(name, tuple(before[name].shape))
        assert 0 < float((values - before[name]).norm() / before[name].norm()) < ERRORS[form], name
    assert torch.equal(
        source.tensor("model.norm.weight", before["model.norm.weight"].shape), before["model.norm.weight"]
    )
    exact, packed = logits_of(unpacked_decoder(output), TOKENS), logits_of(tiny_decoder(output), TOKENS)
    assert float((packed - exact).norm() / exact.norm()) < 0.06  # inputs are rounded, and a token may choose otherwise


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_stay_packed_on_a_gpu(family: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers and of experts; inputs are not rounded."""
    make_tiny_model(tmp_path, family, hidden_size=64, intermediate_size=96, moe_intermediate_size=64)
    output = written(tmp_path, form)
    weights = weights_as_on_a_gpu(output, monkeypatch, torch.float32, has_float8=False)
    assert all(not isinstance(product, Linear) for product in weights.layer_projections)
    exact, packed = (
        logits_of(decoder, TOKENS) for decoder in (unpacked_decoder(output), Decoder(read_config(output), weights))
    )
    torch.testing.assert_close(packed, exact, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_matrices_that_fill_no_blocks_stay_and_memory_is_planned(form: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3_moe")  # experts of 40
    result = quantize_folder(tmp_path, tmp_path / "out", form, lambda done, whole: None)
    assert result.num_left == 2 * 6  # what goes down from 40, in two layers of six experts
    assert result.bytes_after < result.bytes_before
    served = resolve_model(ModelSectionConfig(path=str(tmp_path / "out"), dtype="float32"))
    assert served.stored is not None
    assert served.stored.num_bytes < served.decoder.loaded_weight_bytes("float32")


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    with pytest.raises(ConfigError, match="q2_k"):
        written(tmp_path, "q2_k")
    output = written(tmp_path, "int8")
    with pytest.raises(ConfigError, match="not empty"):
        written(tmp_path, "int8")
    with pytest.raises(UnsupportedModel, match="quantised already"):
        quantize_folder(output, tmp_path / "again", "int8", lambda done, whole: None)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt_oss"}))
    with pytest.raises(UnsupportedModel, match="lie in one tensor"):
        written(tmp_path, "q4_k")
