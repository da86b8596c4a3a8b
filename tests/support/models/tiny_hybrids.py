"""Fields by which the tiny Llama becomes a hybrid: layers of attention and layers with a state."""

from typing import Any

MAMBA2: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
}
DELTA: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
