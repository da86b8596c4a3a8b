"""Arguments of configs of Gemma 3n and 4, whose layers differ from one another, at tiny sizes."""

from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"


def tiny_gemmas(sizes: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return them by family, or family and what is tried, as of tiny_models. `sizes`: that all have."""
    streams = {
        **sizes,
        "num_hidden_layers": 6,
        "head_dim": 24,
        "sliding_window": 6,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING],
        "num_kv_shared_layers": 2,
        "intermediate_size": [96, 96, 80, 96, 64, 96],
        "activation_sparsity_pattern": [0.9, 0.0, 0.7, 0.0, 0.0, 0.9],
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 190,  # fewer than there are tokens
        "altup_num_inputs": 3,
        "laurel_rank": 8,
        "final_logit_softcapping": 9.0,
    }
    layers = {**sizes, "num_hidden_layers": 6, "sliding_window": 6, "layer_types": [SLIDING, SLIDING, FULL] * 2}
    return {
        "gemma3n_text": ("Gemma3nTextConfig", streams),
        "gemma3n_alone": (  # nothing that can be left out
            "Gemma3nTextConfig",
            {
                **streams,
                "num_kv_shared_layers": 0,
                "activation_sparsity_pattern": [0.0] * 6,
                "altup_correct_scale": False,
            },
        ),
        "gemma4_text": (
            "Gemma4TextConfig",
            {
                **layers,
                "head_dim": 16,
                "global_head_dim": 24,
                "num_kv_shared_layers": 3,
                "use_double_wide_mlp": True,
                "hidden_size_per_layer_input": 12,
                "vocab_size_per_layer_input": 199,
                "final_logit_softcapping": 9.0,
            },
        ),
        "gemma4_experts": (
            "Gemma4TextConfig",
            {
                **layers,
                "head_dim": 16,
                "global_head_dim": 32,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 5,
                "top_k_experts": 2,
                "moe_intermediate_size": 40,
            },
        ),
    }
