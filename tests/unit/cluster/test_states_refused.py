"""What a model with a state cannot do is refused by name before anything starts."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.cluster.preflight import check_configuration
from alignedserve.cluster.sizing import with_block_size
from alignedserve.config.sections import ClusterConfig, EngineConfig, LoraConfig, ModelSectionConfig, SchedulingConfig
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import ConfigError, UnsupportedModel
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from tests.support.models.tiny_llama import TINY_LLAMA

LFM2 = {**TINY_LLAMA, "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 16}


def _section(folder: Path, **changes: object) -> ModelSectionConfig:
    (folder / "config.json").write_text(json.dumps({**LFM2, **changes}))
    return ModelSectionConfig(path=str(folder), random_weights=True)


@pytest.fixture
def served(tmp_path: Path) -> ServedModel:
    return resolve_model(_section(tmp_path))


def test_settings(served: ServedModel) -> None:
    plain = ClusterConfig()
    refused = {
        "swap_format=int8 rounds .* blocks of a model with short convolutions": replace(
            plain, decode=replace(plain.decode, swap_format="int8")
        ),
        "keeps layer inputs .* short convolutions": replace(plain, scheduling=SchedulingConfig(policy="apt_serve")),
        "short convolutions has no adapters": replace(plain, lora=LoraConfig(allowed_folder="/adapters")),
    }
    for message, config in refused.items():
        with pytest.raises(ConfigError, match=message):
            check_configuration(config, served)


def test_devices_and_ranks(tmp_path: Path) -> None:
    section = _section(tmp_path)
    assert resolve_model(section, EngineConfig(device="cuda")).decoder.state is not None
    with pytest.raises(ConfigError, match="states of the model's layers are not divided"):
        resolve_model(section, EngineConfig(tensor_parallel=2))


def test_a_model_of_states_alone(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="without any layer of attention"):
        resolve_model(_section(tmp_path, layer_types=["conv", "conv"]))


def test_blocks_are_larger_where_states_are(tmp_path: Path, served: ServedModel) -> None:
    unset, given = from_mapping({}), from_mapping({"engine": {"block_size": 8}})
    assert with_block_size(unset, served).engine.block_size == 16
    assert with_block_size(given, served).engine.block_size == 8
    delta = {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
    large = resolve_model(_section(tmp_path, **delta))
    assert with_block_size(unset, large).engine.block_size == 1024


def test_large_states_have_blocks_of_their_own(tmp_path: Path) -> None:
    """Small states never."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32}
    delta = {"model_type": "qwen3_5_text", "head_dim": 16, **heads, "linear_value_head_dim": 32}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    large = resolve_model(_section(tmp_path, **delta, **kinds), states_apart=True)
    layout = large.block_layout(large.default_block_size)
    assert layout.state_blocks
    assert (layout.block_size, layout.context_bytes) == (64, 16384)  # for states of 10560 bytes
    small = resolve_model(_section(tmp_path), states_apart=True)
    assert not small.block_layout(small.default_block_size).state_blocks
