"""Reads config.json and generation_config.json of a Hugging Face model folder into a ModelConfig; runs no code of it.

Both generations of the files are read: `rope_theta` + `rope_scaling` + `torch_dtype`, and the later
`rope_parameters` + `dtype`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import ModelNotFound, UnsupportedModel
from alignedserve.runtime.model.json_fields import JsonFields, read_json_object
from alignedserve.runtime.model.model_config import Activation, Family, ModelConfig, NormKind, RopeConfig, RopeScaling

MAX_CONFIG_BYTES = 1 << 20
MAX_WIDTH = 1 << 18
MAX_LAYERS = 1 << 10
MAX_HEADS = 1 << 12
MAX_VOCABULARY = 1 << 22
MAX_CONTEXT = 1 << 27

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
        raise ModelNotFound(f"{folder} is not a folder, nor a name on a hub (ORG/NAME).")
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
        rope=_rope(fields, head_dim, default_fraction=fields.number("rotary_pct", 0.0, 1.0, 0.25)),
        is_gated=False,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=True,
        has_parallel_residual=fields.flag("use_parallel_residual", True),
        ties_embeddings=fields.flag("tie_word_embeddings", False),
    )


# Where a key is absent, the value that transformers assumes for the family.
_DEFAULT_KV_HEADS = {Family.MISTRAL: 8, Family.QWEN2: 32, Family.QWEN3: 32}
_DEFAULT_WINDOW = 4096


def _parse_llama_like(fields: JsonFields, family: Family) -> ModelConfig:
    sizes = _sizes(fields, family)
    num_heads = sizes["num_heads"]
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, _DEFAULT_KV_HEADS.get(family, num_heads))
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", "must divide num_attention_heads")
    if family is Family.QWEN3:
        head_dim = fields.integer("head_dim", 1, MAX_WIDTH, 128)
    else:
        head_dim = _head_dim(fields, sizes)
    has_attention_bias = fields.flag("attention_bias", False)
    window, windowed_layers = _window(fields, family, sizes["num_layers"])
    return ModelConfig(
        **sizes,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=_activation(fields, "hidden_act", "silu"),
        norm=NormKind.RMS,
        norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        embedding_size=sizes["hidden_size"],
        rope=_rope(fields, head_dim, default_fraction=1.0),
        sliding_window=window,
        windowed_layers=windowed_layers,
        has_qkv_bias=has_attention_bias or family is Family.QWEN2,
        has_output_bias=has_attention_bias,
        has_mlp_bias=fields.flag("mlp_bias", False),
        has_qk_norm=family is Family.QWEN3,
        ties_embeddings=fields.flag("tie_word_embeddings", False),
    )


_PARSERS: dict[Family, Callable[[JsonFields, Family], ModelConfig]] = {
    Family.OPT: _parse_opt,
    Family.LLAMA: _parse_llama_like,
    Family.MISTRAL: _parse_llama_like,
    Family.QWEN2: _parse_llama_like,
    Family.QWEN3: _parse_llama_like,
    Family.GPT_NEOX: _parse_gpt_neox,
}


def _head_dim(fields: JsonFields, sizes: _Sizes) -> int:
    if fields.has("head_dim"):
        return fields.integer("head_dim", 1, MAX_WIDTH)
    return _default_head_dim(fields, sizes)


def _default_head_dim(fields: JsonFields, sizes: _Sizes) -> int:
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise fields.error("num_attention_heads", "must divide hidden_size")
    return sizes["hidden_size"] // sizes["num_heads"]


def _activation(fields: JsonFields, name: str, default: str) -> Activation:
    value = fields.text(name, default)
    if value not in ACTIVATIONS:
        raise UnsupportedModel(f"Activation {value!r} ({name}) is not one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[value]


def _dtype(fields: JsonFields) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedModel(f"dtype {name!r} is not one of {', '.join(DTYPE_BYTES)}.")
    return name


def _rope(fields: JsonFields, head_dim: int, default_fraction: float) -> RopeConfig:
    section = fields.section("rope_parameters") or fields.section("rope_scaling") or JsonFields({}, "config.json")
    legacy_theta = fields.number("rope_theta", 1.0, 1e12, fields.number("rotary_emb_base", 1.0, 1e12, 10000.0))
    fraction = fields.number("partial_rotary_factor", 0.0, 1.0, default_fraction)
    fraction = section.number("partial_rotary_factor", 0.0, 1.0, fraction)
    rotary_dim = int(head_dim * fraction)
    if rotary_dim % 2 or not rotary_dim:
        raise fields.error("head_dim", "must rotate a positive, even number of dimensions")
    kind = section.text("rope_type", section.text("type", "default"))
    if kind not in [scaling.value for scaling in RopeScaling]:
        raise UnsupportedModel(f"RoPE scaling {kind!r} is not supported (only linear and llama3 are).")
    rope = RopeConfig(theta=section.number("rope_theta", 1.0, 1e12, legacy_theta), rotary_dim=rotary_dim)
    scaling = RopeScaling(kind)
    if scaling is RopeScaling.NONE:
        return rope
    rope = replace(rope, scaling=scaling, factor=section.number("factor", 1.0, 1e6))
    if scaling is RopeScaling.LINEAR:
        return rope
    low = section.number("low_freq_factor", 1e-3, 1e6)
    high = section.number("high_freq_factor", 1e-3, 1e6)
    if high <= low:
        raise section.error("high_freq_factor", "must be above low_freq_factor")
    original_len = section.integer("original_max_position_embeddings", 1, MAX_CONTEXT)
    return replace(rope, low_freq_factor=low, high_freq_factor=high, original_context_len=original_len)


def _window(fields: JsonFields, family: Family, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the size of the sliding window and the layers that have it."""
    if family is Family.LLAMA or not fields.flag("use_sliding_window", family is Family.MISTRAL):
        return None, ()
    if fields.is_present("sliding_window") and not fields.has("sliding_window"):
        return None, ()
    window = fields.integer("sliding_window", 1, MAX_CONTEXT, _DEFAULT_WINDOW)
    layer_types = fields.texts("layer_types", MAX_LAYERS)
    if layer_types:
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown or len(layer_types) != num_layers:
            raise UnsupportedModel("layer_types must name full_attention or sliding_attention for every layer.")
        layers = tuple(layer for layer, kind in enumerate(layer_types) if kind == "sliding_attention")
        return (window, layers) if layers else (None, ())
    first = 0 if family is Family.MISTRAL else fields.integer("max_window_layers", 0, MAX_LAYERS, 28)
    layers = tuple(range(first, num_layers))
    return (window, layers) if layers else (None, ())
