"""gpt-oss with experts of MXFP4, as it is published: the values of the files, and what is read of them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from alignedserve.config.sections import EngineConfig, ModelSectionConfig
from alignedserve.core.errors import ModelError
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.model_files import quantized_weights, read_config
from alignedserve.runtime.model.quantized.layout import Computing
from alignedserve.runtime.model.served_model import resolve_model
from kernels.grouped_linear import SortedExperts
from tests.support.models.gpu_weights import weights_as_on_a_gpu
from tests.support.models.quantized_checkpoints import unpacked_decoder
from tests.support.models.tiny_engines import logits_of, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model, transformers_library

pytestmark = pytest.mark.slow

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TOKENS = random_tokens(3, 19)


def to_mxfp4(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round values [.., width] -> blocks [.., n, 16], scales [.., n], and what they stand for."""
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    exponents = blocks.abs().amax(-1).clamp_min(1e-30).log2().floor() - 2
    scaled = blocks / exponents.exp2()[..., None]
    numbers = (scaled.abs()[..., None] - MAGNITUDES).abs().argmin(-1)
    stood_for = MAGNITUDES[numbers] * scaled.sign() * exponents.exp2()[..., None]
    codes = (numbers + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8), stood_for.flatten(-2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """Return a folder, and the logits of transformers with the same values."""
    folder, plain = tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("plain")
    model = make_tiny_model(folder, "gpt_oss", num_local_experts=8)
    stored, values = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(stored.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            values[name] = tensor
            continue
        del stored[name]
        blocks, scales, turned = to_mxfp4(tensor.transpose(1, 2))
        stored |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
        values[name] = turned.transpose(1, 2).contiguous()
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    model.config.save_pretrained(plain)
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    library = transformers_library()
    same = library.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: Tensor = same.eval()(torch.tensor([TOKENS])).logits[0]
    return folder, logits


def test_values_are_those_of_the_files(made: tuple[Path, Tensor]) -> None:
    folder, expected = made
    torch.testing.assert_close(
        logits_of(unpacked_decoder(folder), TOKENS), expected, rtol=0.0, atol=1e-5 * float(expected.abs().max())
    )


def test_products_in_blocks_round_inputs_alone(made: tuple[Path, Tensor]) -> None:
    folder, expected = made
    decoder = tiny_decoder(folder)
    results = logits_of(decoder, TOKENS)
    assert float((results - expected).norm() / expected.norm()) < 0.02
    assert torch.equal(results, logits_of(decoder, TOKENS, 7, *[1] * 4, 8))


def test_memory_is_that_of_blocks_and_a_token_reads_the_chosen_experts_alone(made: tuple[Path, Tensor]) -> None:
    folder, _ = made
    served = resolve_model(ModelSectionConfig(path=str(folder), dtype="float32"))
    assert served.stored is not None
    assert "float4 in groups of 32" in served.stored.description
    config = served.decoder
    per_expert = 3 * config.hidden_size * config.intermediate_size
    saved = served.decoder.loaded_weight_bytes("float32") - served.stored.num_bytes
    assert saved == config.num_layers * 8 * (4 * per_expert - per_expert * 17 // 32)
    read = 4 * config.num_multiplied - served.stored.step_bytes
    assert read == config.num_layers * 2 * (4 * per_expert - per_expert * 17 // 32)


def test_experts_stay_packed_on_a_gpu(made: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their biases beside them; inputs are not rounded. A value takes 4.25 bits, as in the file."""
    folder, expected = made
    weights, config = weights_as_on_a_gpu(folder, monkeypatch, torch.float32, has_float8=False), read_config(folder)
    assert all(isinstance(layer.mlp, SortedExperts) for layer in weights.layers)
    found = logits_of(Decoder(config, weights), TOKENS)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))
    stored = quantized_weights(folder, config, Computing("cuda:0", "bfloat16"))
    assert stored.warning is None
    saved = config.loaded_weight_bytes("bfloat16") - stored.num_bytes
    per_expert = 3 * config.hidden_size * config.intermediate_size
    assert saved == config.num_layers * 8 * (2 * per_expert - per_expert * 17 // 32)


@pytest.mark.parametrize("is_on_gpu", [False, True])
@pytest.mark.parametrize(("part", "problem"), [("scales", "not finite"), ("blocks", "has shape")])
def test_what_is_wrong_is_named(
    part: str, problem: str, is_on_gpu: bool, made: tuple[Path, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = made
    stored = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    if part == "blocks":
        stored[name.replace("blocks", "scales")] = stored.pop(name.replace("blocks", "scales"))[:, :, :1].contiguous()
    else:
        stored[name].view(-1).numpy()[:1] = np.uint8(255)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    on_gpu = partial(weights_as_on_a_gpu, tmp_path, monkeypatch, torch.float32, has_float8=False)
    load: Callable[[], object] = on_gpu if is_on_gpu else partial(tiny_decoder, tmp_path)
    with pytest.raises(ModelError, match=problem):
        load()


def test_gpus_take_it_and_ranks_are_refused_by_name(made: tuple[Path, Tensor]) -> None:
    section = ModelSectionConfig(path=str(made[0]))
    resolve_model(section, EngineConfig(device="cuda"))
    with pytest.raises(Exception, match="experts are not divided"):
        resolve_model(section, EngineConfig(tensor_parallel=2))
