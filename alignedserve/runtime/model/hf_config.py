"""Reads config.json and generation_config.json of a Hugging Face model folder into a ModelConfig; runs no code of it.

Both generations of the files are read: `rope_theta` + `rope_scaling` + `torch_dtype`, and the later
`rope_parameters` + `dtype`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from alignedserve.core.errors import ModelNotFound, UnsupportedModel
from alignedserve.core.json_fields import JsonFields, read_json_object
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig
from alignedserve.runtime.model.encoder.families import ENCODER_TYPES, is_encoder_type, parse_encoder_config
from alignedserve.runtime.model.hf_fields import (
    DEFAULT_WINDOW,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    default_head_dim,
    read_activation,
    read_dtype,
    read_head_dim,
    read_num_kv_heads,
    read_sizes,
    read_window,
    read_windowed_layers,
)
from alignedserve.runtime.model.model_config import ExpertConfig, Family, ModelConfig, NormKind
from alignedserve.runtime.model.quantized.config import read_quantization
from alignedserve.runtime.model.rope_fields import MAX_CONTEXT, longest_context_len, read_rope, read_rope_pair

MAX_CONFIG_BYTES = 1 << 20


def read_model_config(folder: Path) -> ModelConfig:
    """Read the config of the model in `folder`.

    Raises ModelNotFound when the folder or its config.json is missing, UnsupportedModel naming the architecture or
    option that the engine does not have, ModelError naming the field that is wrong.
    """
    if not folder.is_dir():
        raise ModelNotFound(
            f"{folder} is neither a folder here nor a name on a hub (ORG/NAME, such as Qwen/Qwen3-0.6B)."
        )
    path = folder / "config.json"
    config = parse_model_config(read_json_object(path, MAX_CONFIG_BYTES), where=str(path))
    generation_path = folder / "generation_config.json"
    if not generation_path.exists():
        return config
    generation = JsonFields(read_json_object(generation_path, MAX_CONFIG_BYTES), str(generation_path))
    eos_token_ids = generation.token_ids("eos_token_id", config.vocab_size)
    return replace(config, eos_token_ids=eos_token_ids) if eos_token_ids else config


def read_any_config(folder: Path) -> ModelConfig | EncoderConfig:
    """Read the config of the decoder or encoder in `folder`. Raises like `read_model_config`."""
    path = folder / "config.json"
    if not path.exists():
        return read_model_config(folder)
    fields = JsonFields(read_json_object(path, MAX_CONFIG_BYTES), str(path))
    return parse_encoder_config(fields, folder) if is_encoder_type(fields) else read_model_config(folder)


def parse_model_config(content: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Parse an already decoded config.json. Raises like `read_model_config`."""
    fields = JsonFields(content, where)
    model_type = fields.text("model_type")
    if is_encoder_type(fields):
        raise UnsupportedModel(f"{where}: model_type {model_type!r} is an encoder's, and a decoder is needed here.")
    names = [family.value for family in Family]
    if model_type not in names:
        known = ", ".join((*names, *ENCODER_TYPES))
        raise UnsupportedModel(f"{where}: model_type {model_type!r} is not one of {known}.")
    config = PARSERS[Family(model_type)](fields, Family(model_type))
    return replace(config, stored_quantization=read_quantization(fields))


def _parse_opt(fields: JsonFields, family: Family) -> ModelConfig:
    sizes = read_sizes(fields, family)
    if not fields.flag("layer_norm_elementwise_affine", True):
        raise UnsupportedModel("OPT without layer norm weights (layer_norm_elementwise_affine) is not supported.")
    is_norm_first = fields.flag("do_layer_norm_before", True)
    has_bias = fields.flag("enable_bias", True)
    return ModelConfig(
        **sizes,
        intermediate_size=fields.integer("ffn_dim", 1, MAX_WIDTH),
        num_kv_heads=sizes["num_heads"],
        head_dim=default_head_dim(fields, sizes),
        activation=read_activation(fields, "activation_function", "relu"),
        norm=NormKind.LAYER,
        norm_eps=1e-5,
        embedding_size=fields.integer("word_embed_proj_dim", 1, MAX_WIDTH, sizes["hidden_size"]),
        position_offset=2,
        is_gated=False,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
        is_norm_first=is_norm_first,
        has_final_norm=is_norm_first and not fields.flag("_remove_final_layer_norm", False),
        ties_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _parse_gpt_neox(fields: JsonFields, family: Family) -> ModelConfig:
    sizes = read_sizes(fields, family)
    head_dim = default_head_dim(fields, sizes)
    has_attention_bias = fields.flag("attention_bias", True)
    return ModelConfig(
        **sizes,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_kv_heads=sizes["num_heads"],
        head_dim=head_dim,
        activation=read_activation(fields, "hidden_act", "gelu"),
        norm=NormKind.LAYER,
        norm_eps=fields.number("layer_norm_eps", 0.0, 1.0, 1e-5),
        embedding_size=sizes["hidden_size"],
        rope=read_rope(fields, head_dim, default_fraction=fields.number("rotary_pct", 0.0, 1.0, 0.25)),
        is_gated=False,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=True,
        has_parallel_residual=fields.flag("use_parallel_residual", True),
        ties_embeddings=fields.flag("tie_word_embeddings", False),
    )


# Where a key is absent, the value that transformers assumes for the family.
_DEFAULT_KV_HEADS = {Family.MISTRAL: 8, Family.QWEN2: 32, Family.QWEN3: 32, Family.MIXTRAL: 8, Family.QWEN3_MOE: 4}
_DEFAULT_THETA = {Family.MIXTRAL: 1e6}


def _parse_llama_like(fields: JsonFields, family: Family) -> ModelConfig:
    sizes = read_sizes(fields, family)
    num_heads = sizes["num_heads"]
    if family is Family.QWEN3:
        head_dim = fields.integer("head_dim", 1, MAX_WIDTH, 128)
    else:
        head_dim = read_head_dim(fields, sizes)
    has_attention_bias = fields.flag("attention_bias", False)
    has_experts = family in _EXPERT_READERS
    window, windowed_layers = read_window(fields, family, sizes["num_layers"])
    rope = read_rope(fields, head_dim, default_theta=_DEFAULT_THETA.get(family, 1e4))
    sizes["max_position_embeddings"] = longest_context_len(fields, rope)
    return ModelConfig(
        **sizes,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_kv_heads=read_num_kv_heads(fields, num_heads, _DEFAULT_KV_HEADS.get(family, num_heads)),
        head_dim=head_dim,
        activation=read_activation(fields, "hidden_act", "silu"),
        norm=NormKind.RMS,
        norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        embedding_size=sizes["hidden_size"],
        rope=rope,
        sliding_window=window,
        windowed_layers=windowed_layers,
        has_qkv_bias=has_attention_bias or family is Family.QWEN2,
        has_output_bias=has_attention_bias,
        has_mlp_bias=not has_experts and fields.flag("mlp_bias", False),
        has_qk_norm=family in (Family.QWEN3, Family.QWEN3_MOE),
        ties_embeddings=fields.flag("tie_word_embeddings", False),
        experts=_EXPERT_READERS[family](fields, sizes["num_layers"]) if has_experts else None,
    )


def _mixtral_experts(fields: JsonFields, num_layers: int) -> ExpertConfig:
    num_experts = fields.integer("num_local_experts", 1, MAX_EXPERTS, 8)
    return ExpertConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 1, num_experts, 2),
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        normalises=True,
    )


def _qwen3_experts(fields: JsonFields, num_layers: int) -> ExpertConfig:
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    num_experts = fields.integer(name, 1, MAX_EXPERTS, 128)
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    dense_layers = set(fields.integers("mlp_only_layers", 0, num_layers - 1))
    dense_layers |= {layer for layer in range(num_layers) if (layer + 1) % step}
    return ExpertConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 1, num_experts, 8),
        intermediate_size=fields.integer("moe_intermediate_size", 1, MAX_WIDTH, 768),
        normalises=fields.flag("norm_topk_prob", False),
        dense_layers=tuple(sorted(dense_layers)),
    )


def _parse_granite(fields: JsonFields, family: Family) -> ModelConfig:
    config = _parse_llama_like(fields, family)
    multiplier = fields.number("attention_multiplier", 1e-6, 1e6, 1.0)
    return replace(
        config,
        embedding_multiplier=fields.number("embedding_multiplier", 1e-6, 1e6, 1.0),
        query_multiplier=multiplier * math.sqrt(config.head_dim),
        residual_multiplier=fields.number("residual_multiplier", 1e-6, 1e6, 1.0),
        logits_divisor=fields.number("logits_scaling", 1e-6, 1e6, 1.0),
    )


_EXPERT_READERS: dict[Family, Callable[[JsonFields, int], ExpertConfig]] = {
    Family.MIXTRAL: _mixtral_experts,
    Family.QWEN3_MOE: _qwen3_experts,
}


def _parse_gemma3_with_images(fields: JsonFields, family: Family) -> ModelConfig:
    text = fields.section("text_config")
    if text is None:
        raise fields.error("text_config", "is missing")
    # What holds for both parts stands outside.
    shared = {
        "dtype": read_dtype(fields, "bfloat16"),
        "eos_token_id": list(fields.token_ids("eos_token_id", MAX_VOCABULARY)),
    }
    return _parse_gemma3(text.with_defaults(shared), family)


def _parse_gemma3(fields: JsonFields, family: Family) -> ModelConfig:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.has(name):
            raise UnsupportedModel(f"{name} is not supported.")
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModel("use_bidirectional_attention is not supported.")
    # Published configs leave out what they have in common.
    fields = fields.with_defaults(_GEMMA3_DEFAULTS)
    sizes = read_sizes(fields, family)
    num_heads = sizes["num_heads"]
    head_dim = fields.integer("head_dim", 1, MAX_WIDTH)
    has_attention_bias = fields.flag("attention_bias", False)
    window, windowed_layers = _gemma3_window(fields, sizes["num_layers"])
    rope, windowed_rope = read_rope_pair(fields, head_dim, thetas=(1e6, 1e4))
    return ModelConfig(
        **sizes,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_kv_heads=read_num_kv_heads(fields, num_heads, num_heads),
        head_dim=head_dim,
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        norm=NormKind.RMS_PLUS_ONE,
        norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        embedding_size=sizes["hidden_size"],
        rope=rope,
        windowed_rope=windowed_rope,
        sliding_window=window,
        windowed_layers=windowed_layers,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_qk_norm=True,
        has_post_norms=True,
        ties_embeddings=fields.flag("tie_word_embeddings", True),
        embedding_multiplier=math.sqrt(sizes["hidden_size"]),
        query_multiplier=math.sqrt(head_dim / fields.number("query_pre_attn_scalar", 1e-3, 1e6, 256.0)),
    )


_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "eos_token_id": 1,
}


def _gemma3_window(fields: JsonFields, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the size of the sliding window and its layers: all but every sixth, where the config does not say."""
    window = fields.integer("sliding_window", 1, MAX_CONTEXT, DEFAULT_WINDOW)
    layers = read_windowed_layers(fields, num_layers)
    if layers is None:
        name = "sliding_window_pattern" if fields.has("sliding_window_pattern") else "_sliding_window_pattern"
        pattern = fields.integer(name, 1, MAX_LAYERS, 6)
        layers = tuple(layer for layer in range(num_layers) if (layer + 1) % pattern)
    return (window, layers) if layers else (None, ())


PARSERS: dict[Family, Callable[[JsonFields, Family], ModelConfig]] = {
    Family.OPT: _parse_opt,
    Family.LLAMA: _parse_llama_like,
    Family.MISTRAL: _parse_llama_like,
    Family.QWEN2: _parse_llama_like,
    Family.QWEN3: _parse_llama_like,
    Family.GPT_NEOX: _parse_gpt_neox,
    Family.MIXTRAL: _parse_llama_like,
    Family.QWEN3_MOE: _parse_llama_like,
    Family.PHI3: _parse_llama_like,
    Family.GRANITE: _parse_granite,
    Family.GEMMA3_TEXT: _parse_gemma3,
    Family.GEMMA3: _parse_gemma3_with_images,
}
