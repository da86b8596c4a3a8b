"""The shapes of `bench engine` as transformers' config.json has them."""

from typing import Any

TRANSFORMERS_CONFIGS: dict[str, dict[str, Any]] = {
    "opt-125m": {"model_type": "opt", "activation_function": "relu"},
    "llama-0.5b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}
