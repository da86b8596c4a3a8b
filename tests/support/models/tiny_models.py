"""Small random checkpoints of every family, written by transformers, for tests."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.support.models.tiny_gemma import tiny_gemmas

_SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA_SIZES: dict[str, Any] = {**_SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "attention_dropout": 0.0}
_OPT_SIZES: dict[str, Any] = {**_SIZES, "ffn_dim": 128, "dropout": 0.0, "attention_dropout": 0.0}
_GEMMA3: dict[str, Any] = {
    **_LLAMA_SIZES,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "sliding_window": 6,
    "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Family, or family and the option that is tried: config class and its arguments.
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_LLAMA_SIZES, "tie_word_embeddings": False}),
    "llama_mha": ("LlamaConfig", {**_LLAMA_SIZES, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama_mqa": ("LlamaConfig", {**_LLAMA_SIZES, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama_llama3_rope": ("LlamaConfig", {**_LLAMA_SIZES, "rope_parameters": _LLAMA3_ROPE}),
    "llama_linear_rope": (
        "LlamaConfig",
        {**_LLAMA_SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "llama_yarn_rope": ("LlamaConfig", {**_LLAMA_SIZES, "rope_parameters": _YARN_ROPE}),
    "qwen2_yarn_rope": (
        "Qwen2Config",
        {
            **_LLAMA_SIZES,
            "rope_parameters": {**_YARN_ROPE, "beta_fast": 20.0, "beta_slow": 0.5, "truncate": False, "mscale": 1.2}
            | {"mscale_all_dim": 0.7},
        },
    ),
    "mistral": ("MistralConfig", {**_LLAMA_SIZES, "sliding_window": None, "head_dim": 24}),
    "mistral_window": ("MistralConfig", {**_LLAMA_SIZES, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", {**_LLAMA_SIZES, "tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2Config",
        {**_LLAMA_SIZES, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**_LLAMA_SIZES, "head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "mixtral": ("MixtralConfig", {**_LLAMA_SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_LLAMA_SIZES,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "phi3": ("Phi3Config", {**_LLAMA_SIZES, "sliding_window": 8}),
    "phi3_long_rope": (
        "Phi3Config",
        {
            **_LLAMA_SIZES,
            "original_max_position_embeddings": 5,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.0, 1.2, 1.3, 1.5, 2.0],
                "long_factor": [1.0, 1.1, 1.5, 2.0, 4.0, 9.0],
            },
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            **_LLAMA_SIZES,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.3,
            "logits_scaling": 6.0,
        },
    ),
    "gemma3_text": ("Gemma3TextConfig", _GEMMA3),
    "opt": ("OPTConfig", {**_OPT_SIZES}),
    "opt_post_norm": (
        "OPTConfig",
        {**_OPT_SIZES, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
    ),
    "gpt_neox": ("GPTNeoXConfig", {**_SIZES, "intermediate_size": 128, "tie_word_embeddings": False}),
    "gpt_neox_serial": (
        "GPTNeoXConfig",
        {**_SIZES, "intermediate_size": 128, "use_parallel_residual": False, "rotary_pct": 0.5},
    ),
}

_WINDOWS = {
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DEEPSEEK_EXPERTS: dict[str, Any] = {
    **_LLAMA_SIZES,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_GRANITE_EXPERTS: dict[str, Any] = {
    **_LLAMA_SIZES,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.3,
    "logits_scaling": 6.0,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "q_lora_rank": 24,
}
_DEEPSEEK_YARN = {**_YARN_ROPE, "mscale": 1.2, "mscale_all_dim": 0.7}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
# The same of families whose parts others have as well: what they differ in is tried, and nothing twice.
LATER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", {**_LLAMA_SIZES, "head_dim": 24}),
    "ministral": ("MinistralConfig", {**_LLAMA_SIZES, **_WINDOWS, "head_dim": 24}),
    "smollm3": ("SmolLM3Config", {**_LLAMA_SIZES, "num_hidden_layers": 5}),
    "smollm3_window": (
        "SmolLM3Config",
        {**_LLAMA_SIZES, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 7},
    ),
    "olmo2": ("Olmo2Config", {**_LLAMA_SIZES}),
    "olmo3": (
        "Olmo3Config",
        {
            **_LLAMA_SIZES,
            **_WINDOWS,
            "rope_parameters": {"full_attention": _YARN_ROPE, "sliding_attention": _ROPE},
        },
    ),
    "olmoe": ("OlmoeConfig", {**_LLAMA_SIZES, "num_experts": 6, "num_experts_per_tok": 3}),
    "flex_olmo": ("FlexOlmoConfig", {**_LLAMA_SIZES, "num_experts": 5, "num_experts_per_tok": 2}),
    "exaone4": ("Exaone4Config", {**_LLAMA_SIZES, **_WINDOWS}),
    "exaone4_whole": ("Exaone4Config", {**_LLAMA_SIZES, "sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {**_LLAMA_SIZES, "head_dim": 24}),
    "seed_oss": ("SeedOssConfig", {**_LLAMA_SIZES, "head_dim": 24}),
    "cwm": ("CwmConfig", {**_LLAMA_SIZES, "head_dim": 16, "sliding_window": 6, "rope_parameters": _LLAMA3_ROPE}),
    "cohere": ("CohereConfig", {**_LLAMA_SIZES, "logit_scale": 0.3}),
    "cohere2": ("Cohere2Config", {**_LLAMA_SIZES, **_WINDOWS, "logit_scale": 0.3}),
    "glm": ("GlmConfig", {**_LLAMA_SIZES, "head_dim": 24}),
    "glm4": ("Glm4Config", {**_LLAMA_SIZES, "head_dim": 24}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_LLAMA_SIZES,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [0],
        },
    ),
    "glm4_moe": ("Glm4MoeConfig", {**_DEEPSEEK_EXPERTS, "use_qk_norm": True, "head_dim": 24}),
    "dots1": ("Dots1Config", {**_DEEPSEEK_EXPERTS, "n_shared_experts": 2, "norm_topk_prob": False}),
    "granitemoe": ("GraniteMoeConfig", {**_GRANITE_EXPERTS}),
    "granitemoeshared": ("GraniteMoeSharedConfig", {**_GRANITE_EXPERTS, "shared_intermediate_size": 40}),
    "minimax_m2": (
        "MiniMaxM2Config",
        {**_LLAMA_SIZES, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 24, "rotary_dim": 12},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_LLAMA_SIZES,
            **_WINDOWS,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 24,
            "rope_parameters": {**_YARN_ROPE, "truncate": False},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**_DEEPSEEK_EXPERTS, **_LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"}
        | {"norm_topk_prob": False, "rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**_DEEPSEEK_EXPERTS, **_LATENT, "rope_parameters": _DEEPSEEK_YARN}),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**_DEEPSEEK_EXPERTS, **_LATENT, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "gemma2": (
        "Gemma2Config",
        {**_LLAMA_SIZES, **_WINDOWS, "head_dim": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    ),
    "vaultgemma": ("VaultGemmaConfig", {**_LLAMA_SIZES, **_WINDOWS, "head_dim": 24, "query_pre_attn_scalar": 24}),
    "youtu": ("YoutuConfig", {**_LLAMA_SIZES, **_LATENT}),
    "solar_open": ("SolarOpenConfig", {**_DEEPSEEK_EXPERTS, "head_dim": 24, "attention_bias": True}),
    "llama4_text": (
        "Llama4TextConfig",
        {
            **_LLAMA_SIZES,
            "num_hidden_layers": 5,
            "intermediate_size_mlp": 80,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "moe_layers": [1, 3],
            "head_dim": 24,
            "attention_chunk_size": 9,
            "floor_scale": 6,
            "attn_scale": 0.4,
        },
    ),
    "nemotron": ("NemotronConfig", {**_LLAMA_SIZES}),
    "arcee": ("ArceeConfig", {**_LLAMA_SIZES}),
    "helium": ("HeliumConfig", {**_LLAMA_SIZES, "head_dim": 16, "attention_bias": True}),
    "ernie4_5": ("Ernie4_5Config", {**_LLAMA_SIZES, "head_dim": 16, "use_bias": True}),
    "starcoder2": ("Starcoder2Config", {**_LLAMA_SIZES, "sliding_window": 6}),
    "stablelm": ("StableLmConfig", {**_LLAMA_SIZES, "use_qkv_bias": True}),
    "lfm2": ("Lfm2Config", {**_LLAMA_SIZES, "num_hidden_layers": 4, "full_attn_idxs": [1], "block_multiple_of": 32}),
    "lfm2_bias": (
        "Lfm2Config",
        {
            **_LLAMA_SIZES,
            "full_attn_idxs": [0, 2],
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **_LLAMA_SIZES,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {**_GRANITE_EXPERTS, **_MAMBA2, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 40},
    ),
    "granitemoehybrid_dense": (
        "GraniteMoeHybridConfig",
        {
            **_GRANITE_EXPERTS,
            **_MAMBA2,
            "num_local_experts": 0,
            "mamba_n_groups": 1,
            "position_embedding_type": "rope",
            "layer_types": ["attention", "mamba", "mamba"],
            "shared_intermediate_size": 40,
        },
    ),
    "bamba": ("BambaConfig", {**_LLAMA_SIZES, **_MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": (
        "FalconH1Config",
        {
            **_LLAMA_SIZES,
            **_MAMBA2,
            "mamba_d_ssm": 128,
            "ssm_multipliers": [0.9, 0.8, 1.1, 0.7, 1.2],
            "mlp_multipliers": [0.7, 0.6],
            "key_multiplier": 0.8,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.6,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 3.0,
        },
    ),
    "falcon_h1_norm": (
        "FalconH1Config",
        {**_LLAMA_SIZES, **_MAMBA2, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_DEEPSEEK_EXPERTS,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 12,
            "head_dim": 24,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 24,
            "time_step_min": 1e-6,
            "layers_block_type": ["mamba", "mlp", "mamba", "attention", "moe", "mamba"],
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_LLAMA_SIZES, **_DELTA, "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
        | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 24},
    ),
    **tiny_gemmas(_LLAMA_SIZES),
    "qwen3_5_text": ("Qwen3_5TextConfig", {**_LLAMA_SIZES, **_DELTA}),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        {**_LLAMA_SIZES, **_DELTA, "num_experts": 5, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 24},
    ),
}


def transformers_library() -> Any:
    """Return transformers, which takes a second to import and is not typed for strict checking."""
    return import_module("transformers")


def make_tiny_model(folder: Path, family: str, seed: int = 0, **changes: Any) -> Any:
    """Write a checkpoint into `folder` and return the same model (float32, evaluation mode).

    `family`: a key of TINY_MODELS or LATER_FAMILIES. `changes`: arguments of its config in place of those there.
    """
    library = transformers_library()
    class_name, arguments = (TINY_MODELS | LATER_FAMILIES)[family]
    config = getattr(library, class_name)(**arguments | changes)
    torch.manual_seed(seed)
    model: Any = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger and less regular than a fresh model: biases that do something, logits that differ.
            parameter.add_(torch.randn(parameter.shape) * (0.05 if "norm" in name or "bias" in name else 0.08))
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn(buffer.shape) * 0.2)
    model.train(False)
    library.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, safe_serialization=True)
    return model
