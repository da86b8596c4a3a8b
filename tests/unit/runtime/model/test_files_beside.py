"""What lies beside the file one looks at: a folder means what it means to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignedserve.core.errors import ModelError
from alignedserve.runtime.engine.forward.decoder import inverse_frequencies
from alignedserve.runtime.model.decoder.decoder_parts import RopeConfig
from alignedserve.runtime.model.model_files import parse_model_config
from tests.support.marks import each
from tests.support.models.tiny_engines import logits_of, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model, transformers_library

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HALVES = "first.safetensors", "second.safetensors"
TOKENS = random_tokens(1, 20)


def equal_logits(folder: Path) -> None:
    library = transformers_library()
    reference = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(tiny_decoder(folder), TOKENS), expected, rtol=0.0, atol=1e-4)


def in_halves(folder: Path, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Write two shards and an index, by which a tensor of both is the first's."""
    (folder / WHOLE).unlink()
    for name, tensors in zip(HALVES, (first, second), strict=True):
        save_file(tensors, folder / name, {"format": "pt"})
    weight_map = {name: file for file, names in zip(HALVES[::-1], (second, first), strict=True) for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3_text", "opt", "gpt_neox", "cohere", "granite"])
def test_a_head_in_the_files_counts(family: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family, tie_word_embeddings=True)
    tensors = load_file(tmp_path / WHOLE)
    embedding = next(name for name in tensors if ".embed_" in name and "pos" not in name)
    head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    alone = {head if name == embedding else name: tensor for name, tensor in tensors.items()}
    save_file(alone, tmp_path / WHOLE, {"format": "pt"})
    equal_logits(tmp_path)  # both are one, by the name of the other
    own = {head: torch.randn_like(tensors[embedding]) * 0.1}
    save_file(tensors | own, tmp_path / WHOLE, {"format": "pt"})
    equal_logits(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: config[key] for key in config if "tie_" not in key}))
    in_halves(tmp_path, tensors, own)
    equal_logits(tmp_path)


def test_the_index_says_which_of_two_tensors_counts(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    expected, tensors = logits_of(tiny_decoder(tmp_path), TOKENS), load_file(tmp_path / WHOLE)
    stale = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if "norm" in name}
    in_halves(tmp_path, tensors, stale)
    assert torch.equal(logits_of(tiny_decoder(tmp_path), TOKENS), expected)
    save_file(tensors, tmp_path / WHOLE, {"format": "pt"})  # beside which the index is left over
    for half in HALVES:
        (tmp_path / half).unlink()
    assert torch.equal(logits_of(tiny_decoder(tmp_path), TOKENS), expected)


DIVISORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn by its old name": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **BANDS},
    "longrope": {"rope_type": "longrope", "factor": 8.0, **DIVISORS},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},  # which scales beyond the model's length
    "another base": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
}
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.filterwarnings("default")
@each("family", ["llama", "qwen2", "qwen3", "granite", "mistral", "gemma3_text"])
@each("name", SCALINGS)
def test_a_scaling_beside_parameters_counts(family: str, name: str) -> None:
    parameters: dict[str, Any] = {"full_attention": PLAIN, "sliding_attention": PLAIN} if "gemma" in family else PLAIN
    beside = {"rope_parameters": parameters, "rope_scaling": SCALINGS[name], "head_dim": 16, **SIZES}
    served = parse_model_config({"model_type": family, **beside}).rope
    assert served is not None
    section = {**SCALINGS[name], "rope_type": SCALINGS[name].get("rope_type", "yarn")}
    config = transformers_library().AutoConfig.for_model(
        "llama", **SIZES, head_dim=16, rope_parameters={"rope_theta": 10000.0, **section}
    )
    form = transformers_library().modeling_rope_utils.ROPE_INIT_FUNCTIONS[section["rope_type"]]
    expected, factor = form(config, "cpu", seq_len=512)
    torch.testing.assert_close(inverse_frequencies(served), expected, rtol=2e-5, atol=0.0)
    assert served.angle_factor == pytest.approx(factor)


@each(
    ("beside", "theta", "rotary_dim"),
    [
        ({}, 1e6, 8),
        ({"rope_theta": 5e5}, 5e5, 8),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 7.0}}, 7.0, 8),
        ({"rope_scaling": {}}, 1e6, 8),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0}}, 1e6, 16),
    ],
)
def test_a_scaling_leaves_the_rest_as_it_was(beside: dict[str, Any], theta: float, rotary_dim: int) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    scaling = {"type": "linear", "factor": 2.0}
    config = {"model_type": "llama", **SIZES, "rope_parameters": parameters, "rope_scaling": scaling, **beside}
    rope = parse_model_config(config).rope
    assert rope is not None
    assert (rope.theta, rope.rotary_dim) == (theta, rotary_dim)


def test_a_scaling_of_a_part_that_sees() -> None:
    text = {"model_type": "qwen2_5_vl_text", **SIZES, "rope_parameters": {**PLAIN, "mrope_section": [2, 3, 3]}}
    scaling = SCALINGS["yarn"]
    outer = {"model_type": "qwen2_5_vl", "text_config": {**text, "rope_scaling": scaling}}
    rope = parse_model_config(outer).rope
    assert isinstance(rope, RopeConfig)
    assert rope.factor == 4.0
    assert len(rope.axes) == 8
    with pytest.raises(ModelError, match="rope_scaling must be an object"):
        parse_model_config({"model_type": "llama", **SIZES, "rope_scaling": "yarn"})
