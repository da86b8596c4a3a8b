"""What Gemma 3n and 4 cannot do is refused by name before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.cluster.preflight import check_configuration
from alignedserve.config.sections import ClusterConfig, EngineConfig, LoraConfig, ModelSectionConfig, SchedulingConfig
from alignedserve.core.errors import ConfigError, ModelError, UnsupportedModel
from alignedserve.runtime.model.hf_config import parse_model_config
from alignedserve.runtime.model.served_model import resolve_model
from tests.support.models.tiny_llama import TINY_LLAMA

GEMMA3N = {**TINY_LLAMA, "model_type": "gemma3n_text", "num_hidden_layers": 5, "num_kv_shared_layers": 0}
GEMMA4 = {**TINY_LLAMA, "model_type": "gemma4_text", "num_hidden_layers": 6}
TITLE = "layer embeddings, shared keys or several streams"


def test_settings_devices_and_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3N))
    section = ModelSectionConfig(path=str(tmp_path), random_weights=True)
    served, plain = resolve_model(section), ClusterConfig()
    for config in (
        replace(plain, scheduling=SchedulingConfig(policy="apt_serve")),
        replace(plain, lora=LoraConfig(allowed_folder="/adapters")),
    ):
        with pytest.raises(ConfigError, match=TITLE):
            check_configuration(config, served)
    assert resolve_model(section, EngineConfig(device="cuda")).decoder.extras is not None
    with pytest.raises(ConfigError, match=TITLE):
        resolve_model(section, EngineConfig(tensor_parallel=2))
    with pytest.raises(ConfigError, match=TITLE):
        resolve_model(section, EngineConfig(pipeline_parallel=2))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GEMMA3N, {"altup_active_idx": 1}, "altup_active_idx other than 0"),
        (GEMMA3N, {"intermediate_size": [32, 32]}, "intermediate_size must be a whole number, or a list of 5"),
        (GEMMA3N, {"num_kv_shared_layers": 1}, "num_kv_shared_layers must leave a layer of each kind"),
        (GEMMA3N, {"attention_bias": True}, "attention_bias of gemma3n_text"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention other than vision"),
        (GEMMA4, {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config must give all layers without"),
        (GEMMA4, {"per_layer_config": {"5": {"sliding_window": 8}}}, "head_dim and num_key_value_heads alone"),
        (GEMMA4, {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3}, "top_k_experts must be between"),
    ],
)
def test_configs_that_contradict_themselves(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelError, UnsupportedModel), match=message):
        parse_model_config({**config, **changes})
