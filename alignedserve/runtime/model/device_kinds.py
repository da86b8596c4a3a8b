"""Kinds of layers that a GPU computes by kernels of their own, and a small model of each for its self-check.

Widths of heads, latents and states are those of published models, so that kernels are compiled as they are for these;
nothing in them chooses between experts, where rounding alone would decide.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from alignedserve.runtime.model.decoder.decoder_parts import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    CheckpointQuantization,
    QuantMethod,
)
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.decoder.state_config import DeltaConfig, ShortConvConfig, SpaceConfig

_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


class DeviceKind(NamedTuple):
    """One kind: which models have such layers, and what a small one has in its config.json."""

    is_of: Callable[[ModelConfig], bool]
    fields: dict[str, Any]
    instead: str = "engine.device=cpu"  # what to set where a GPU does not compute it


def _with_narrow_experts(is_of: Callable[[CheckpointQuantization], bool], quantization: dict[str, Any]) -> DeviceKind:
    fields = {
        **_SIZES,
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "quantization_config": quantization,
    }
    return DeviceKind(
        lambda config: config.stored_quantization is not None and is_of(config.stored_quantization), fields
    )


def _with_floats_of_4_bits(format_name: str, group_size: int) -> DeviceKind:
    numbers = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": numbers}}
    quantization = {"quant_method": "compressed-tensors", "format": format_name, "config_groups": groups}
    return _with_narrow_experts(lambda stored: stored.has_float4(group_size), quantization)


RINGS = "windows that forget"  # of models whose cache is so, and no kind of theirs: see BlockLayout.with_rings
BLOCKS = "weights in blocks"
KINDS: dict[str, DeviceKind] = {
    "attention sinks": DeviceKind(
        lambda config: config.has_sinks,
        {
            **_SIZES,
            "model_type": "gpt_oss",
            "head_dim": 64,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "layer_types": [_SLIDING, _FULL],
            "rope_scaling": None,
            "attention_bias": True,
            "hidden_act": "silu",
        },
    ),
    "latent attention": DeviceKind(
        lambda config: config.latent is not None,
        {
            **_SIZES,
            "model_type": "deepseek_v3",
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 2,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "hidden_act": "silu",
        },
    ),
    "capped scores": DeviceKind(
        lambda config: config.score_cap is not None,
        {
            **_SIZES,
            "model_type": "gemma2",
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 32,
            "layer_types": [_SLIDING, _FULL],
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "chunked attention": DeviceKind(
        lambda config: config.has_chunked_windows,
        {
            **_SIZES,
            "model_type": "llama4_text",
            "head_dim": 128,
            "intermediate_size_mlp": 512,
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
            "moe_layers": [1],
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 0],
            "floor_scale": 64,
            "attn_scale": 0.1,
            "attn_temperature_tuning": True,
            "use_qk_norm": True,
            "hidden_act": "silu",
        },
    ),
    "short convolutions": DeviceKind(
        lambda config: isinstance(config.state, ShortConvConfig),
        {
            **_SIZES,
            "model_type": "lfm2",
            "full_attn_idxs": [1],
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "block_multiple_of": 256,
        },
    ),
    "Mamba-2": DeviceKind(
        lambda config: isinstance(config.state, SpaceConfig),
        {
            **_SIZES,
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 512,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 64,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "position_embedding_type": "rope",
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "hidden_act": "silu",
        },
    ),
    "the gated delta rule": DeviceKind(
        lambda config: isinstance(config.state, DeltaConfig),
        {
            **_SIZES,
            "model_type": "qwen3_5_text",
            "head_dim": 128,
            "layer_types": ["linear_attention", _FULL],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "partial_rotary_factor": 0.25,
            "hidden_act": "silu",
        },
    ),
    "heads of two sizes": DeviceKind(
        lambda config: config.extras is not None,
        {
            **_SIZES,
            "model_type": "gemma4_text",
            "head_dim": 256,
            "global_head_dim": 512,
            "num_kv_shared_layers": 0,
            "sliding_window": 32,
            "layer_types": [_SLIDING, _FULL],
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 1024,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "weights in MXFP4": _with_floats_of_4_bits("mxfp4-pack-quantized", MXFP4_GROUP),
    "weights in NVFP4": _with_floats_of_4_bits("nvfp4-pack-quantized", NVFP4_GROUP),
    BLOCKS: _with_narrow_experts(
        lambda stored: stored.method is QuantMethod.BLOCKS, {"quant_method": QuantMethod.BLOCKS.value}
    ),
    RINGS: DeviceKind(
        lambda _: False,
        {
            **_SIZES,
            "model_type": "gemma3_text",
            "num_hidden_layers": 3,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 32,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "hidden_activation": "gelu_pytorch_tanh",
        },
        instead="engine.window_cache=whole",
    ),
}


def kinds_of(config: ModelConfig, *, has_rings: bool = False, is_gguf: bool = False) -> dict[str, str]:
    """Return the kinds that a model has, each with what to set where they are not computed. `has_rings`: its cache;
    `is_gguf`: its file."""
    names = [name for name, kind in KINDS.items() if kind.is_of(config)]
    names += [name for name, is_there in ((BLOCKS, is_gguf), (RINGS, has_rings)) if is_there]
    return {name: KINDS[name].instead for name in names}
