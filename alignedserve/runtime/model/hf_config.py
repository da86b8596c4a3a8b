"""Reads config.json and generation_config.json of a Hugging Face model folder into a ModelConfig; runs no code of it.

Both generations of the files are read: `rope_theta` + `rope_scaling` + `torch_dtype`, and the later
`rope_parameters` + `dtype`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import ModelNotFound, UnsupportedModel
from alignedserve.runtime.model.json_fields import JsonFields, read_json_object
from alignedserve.runtime.model.model_config import Activation, ExpertConfig, Family, ModelConfig, NormKind
from alignedserve.runtime.model.rope_fields import MAX_CONTEXT, longest_context_len, read_rope, read_rope_pair

MAX_CONFIG_BYTES = 1 << 20
MAX_WIDTH = 1 << 18
MAX_LAYERS = 1 << 10
MAX_HEADS = 1 << 12
MAX_EXPERTS = 1 << 12
MAX_VOCABULARY = 1 << 22

ACTIVATIONS = {
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


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


def parse_model_config(content: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Parse an already decoded config.json. Raises like `read_model_config`."""
    fields = JsonFields(content, where)
    model_type = fields.text("model_type")
    names = [family.value for family in Family]
    if model_type not in names:
        raise UnsupportedModel(f"{where}: model_type {model_type!r} is not one of {', '.join(names)}.")
    if fields.has("quantization_config"):
        raise UnsupportedModel(f"{where}: quantization_config is not supported.")
    return _PARSERS[Family(model_type)](fields, Family(model_type))


class _Sizes(TypedDict):
    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]


def _sizes(fields: JsonFields, family: Family) -> _Sizes:
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCABULARY)
    return {
        "family": family,
        "vocab_size": vocab_size,
        "hidden_size": fields.integer("hidden_size", 1, MAX_WIDTH),
        "num_layers": fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        "num_heads": fields.integer("num_attention_heads", 1, MAX_HEADS),
        "max_position_embeddings": fields.integer("max_position_embeddings", 1, MAX_CONTEXT),
        "dtype": _dtype(fields),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size),
    }


def _parse_opt(fields: JsonFields, family: Family) -> ModelConfig:
    sizes = _sizes(fields, family)
    if not fields.flag("layer_norm_elementwise_affine", True):
        raise UnsupportedModel("OPT without layer norm weights (layer_norm_elementwise_affine) is not supported.")
    is_norm_first = fields.flag("do_layer_norm_before", True)
    has_bias = fields.flag("enable_bias", True)
    return ModelConfig(
        **sizes,
        intermediate_size=fields.integer("ffn_dim", 1, MAX_WIDTH),
        num_kv_heads=sizes["num_heads"],
        head_dim=_default_head_dim(fields, sizes),
        activation=_activation(fields, "activation_function", "relu"),
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
    sizes = _sizes(fields, family)
    head_dim = _default_head_dim(fields, sizes)
    has_attention_bias = fields.flag("attention_bias", True)
    return ModelConfig(
        **sizes,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_kv_heads=sizes["num_heads"],
        head_dim=head_dim,
        activation=_activation(fields, "hidden_act", "gelu"),
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
_DEFAULT_WINDOW = 4096


def _parse_llama_like(fields: JsonFields, family: Family) -> ModelConfig:
    sizes = _sizes(fields, family)
    num_heads = sizes["num_heads"]
    if family is Family.QWEN3:
        head_dim = fields.integer("head_dim", 1, MAX_WIDTH, 128)
    else:
        head_dim = _head_dim(fields, sizes)
    has_attention_bias = fields.flag("attention_bias", False)
    has_experts = family in _EXPERT_READERS
    window, windowed_layers = _window(fields, family, sizes["num_layers"])
    rope = read_rope(fields, head_dim, default_theta=_DEFAULT_THETA.get(family, 1e4))
    sizes["max_position_embeddings"] = longest_context_len(fields, rope)
    return ModelConfig(
        **sizes,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_kv_heads=_num_kv_heads(fields, num_heads, _DEFAULT_KV_HEADS.get(family, num_heads)),
        head_dim=head_dim,
        activation=_activation(fields, "hidden_act", "silu"),
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
        "dtype": _dtype(fields, "bfloat16"),
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
    sizes = _sizes(fields, family)
    num_heads = sizes["num_heads"]
    head_dim = fields.integer("head_dim", 1, MAX_WIDTH)
    has_attention_bias = fields.flag("attention_bias", False)
    window, windowed_layers = _gemma3_window(fields, sizes["num_layers"])
    rope, windowed_rope = read_rope_pair(fields, head_dim, thetas=(1e6, 1e4))
    return ModelConfig(
        **sizes,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_kv_heads=_num_kv_heads(fields, num_heads, num_heads),
        head_dim=head_dim,
        activation=_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
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
    window = fields.integer("sliding_window", 1, MAX_CONTEXT, _DEFAULT_WINDOW)
    layers = _windowed_layers(fields, num_layers)
    if layers is None:
        name = "sliding_window_pattern" if fields.has("sliding_window_pattern") else "_sliding_window_pattern"
        pattern = fields.integer(name, 1, MAX_LAYERS, 6)
        layers = tuple(layer for layer in range(num_layers) if (layer + 1) % pattern)
    return (window, layers) if layers else (None, ())


_PARSERS: dict[Family, Callable[[JsonFields, Family], ModelConfig]] = {
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


def _head_dim(fields: JsonFields, sizes: _Sizes) -> int:
    if fields.has("head_dim"):
        return fields.integer("head_dim", 1, MAX_WIDTH)
    return _default_head_dim(fields, sizes)


def _default_head_dim(fields: JsonFields, sizes: _Sizes) -> int:
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise fields.error("num_attention_heads", "must divide hidden_size")
    return sizes["hidden_size"] // sizes["num_heads"]


def _num_kv_heads(fields: JsonFields, num_heads: int, default: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, default)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", "must divide num_attention_heads")
    return num_kv_heads


def _activation(fields: JsonFields, name: str, default: str) -> Activation:
    value = fields.text(name, default)
    if value not in ACTIVATIONS:
        raise UnsupportedModel(f"Activation {value!r} ({name}) is not one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[value]


def _dtype(fields: JsonFields, default: str = "float32") -> str:
    name = fields.text("dtype", fields.text("torch_dtype", default)).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedModel(f"dtype {name!r} is not one of {', '.join(DTYPE_BYTES)}.")
    return name


def _window(fields: JsonFields, family: Family, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the size of the sliding window and the layers that have it."""
    is_optional = family in (Family.MIXTRAL, Family.PHI3)
    if family in (Family.LLAMA, Family.GRANITE):
        return None, ()
    if not fields.flag("use_sliding_window", is_optional or family is Family.MISTRAL):
        return None, ()
    if (fields.is_present("sliding_window") or is_optional) and not fields.has("sliding_window"):
        return None, ()
    window = fields.integer("sliding_window", 1, MAX_CONTEXT, _DEFAULT_WINDOW)
    layers = _windowed_layers(fields, num_layers)
    if layers is None:
        has_some = family in (Family.QWEN2, Family.QWEN3)
        first = fields.integer("max_window_layers", 0, MAX_LAYERS, 28) if has_some else 0
        layers = tuple(range(first, num_layers))
    return (window, layers) if layers else (None, ())


def _windowed_layers(fields: JsonFields, num_layers: int) -> tuple[int, ...] | None:
    """Return the layers that `layer_types` gives a window; None: it is absent."""
    layer_types = fields.texts("layer_types", MAX_LAYERS)
    if not layer_types:
        return None
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown or len(layer_types) != num_layers:
        raise UnsupportedModel("layer_types must name full_attention or sliding_attention for every layer.")
    return tuple(layer for layer, kind in enumerate(layer_types) if kind == "sliding_attention")
