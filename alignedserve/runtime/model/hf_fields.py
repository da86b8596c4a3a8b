"""Reads the fields that the config.json of several families share."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypedDict

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.decoder.decoder_parts import Activation, RopeConfig, RopeScaling

MAX_CONTEXT = 1 << 27
_MAX_THETA = 1e12
_MAX_FACTOR = 1e6
_MAX_RUN = 1 << 12
_DEFAULT_THETA = 10000.0
_ORIGINAL_LEN = "original_max_position_embeddings"
MAX_WIDTH = 1 << 18
MAX_LAYERS = 1 << 10
MAX_HEADS = 1 << 12
MAX_EXPERTS = 1 << 12
MAX_VOCABULARY = 1 << 22

DEFAULT_WINDOW = 4096

ACTIVATIONS = {
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


class SharedSizes(TypedDict):
    """The sizes that every family has, as arguments of ModelConfig."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]


def read_sizes(fields: JsonFields, family: str) -> SharedSizes:
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCABULARY)
    return {
        "family": family,
        "vocab_size": vocab_size,
        "hidden_size": fields.integer("hidden_size", 1, MAX_WIDTH),
        "num_layers": fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        "num_heads": fields.integer("num_attention_heads", 1, MAX_HEADS),
        "max_position_embeddings": fields.integer("max_position_embeddings", 1, MAX_CONTEXT),
        "dtype": read_dtype(fields),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size),
    }


def default_head_dim(fields: JsonFields, sizes: SharedSizes) -> int:
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise fields.error("num_attention_heads", "must divide hidden_size")
    return sizes["hidden_size"] // sizes["num_heads"]


def read_num_kv_heads(fields: JsonFields, num_heads: int, default: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, default)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", "must divide num_attention_heads")
    return num_kv_heads


def read_activation(fields: JsonFields, name: str, default: str) -> Activation:
    value = fields.text(name, default)
    if value not in ACTIVATIONS:
        raise UnsupportedModel(f"Activation {value!r} ({name}) is not one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[value]


def read_dtype(fields: JsonFields, default: str = "float32") -> str:
    name = fields.text("dtype", fields.text("torch_dtype", default)).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedModel(f"dtype {name!r} is not one of {', '.join(DTYPE_BYTES)}.")
    return name


def read_rope(
    fields: JsonFields, head_dim: int, *, default_fraction: float = 1.0, default_theta: float = _DEFAULT_THETA
) -> RopeConfig:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling`. Raises like `read_model_config`."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling") or JsonFields({}, "config.json")
    legacy_theta = fields.number("rotary_emb_base", 1.0, _MAX_THETA, default_theta)
    theta = fields.number("rope_theta", 1.0, _MAX_THETA, legacy_theta)
    fraction = fields.number("partial_rotary_factor", 0.0, 1.0, default_fraction)
    fraction = section.number("partial_rotary_factor", 0.0, 1.0, fraction)
    if _kind(section) == RopeScaling.PROPORTIONAL.value:  # all of a head is rotated, some of it by nothing
        fraction = 1.0
    rotary_dim = int(head_dim * fraction)
    if rotary_dim % 2 or not rotary_dim:
        raise fields.error("head_dim", "must rotate a positive, even number of dimensions")
    rope = RopeConfig(theta=section.number("rope_theta", 1.0, _MAX_THETA, theta), rotary_dim=rotary_dim)
    return scaled_rope(fields, section, rope)


def with_axes(fields: JsonFields, rope: RopeConfig, *, takes_turns: bool) -> RopeConfig:
    """Return `rope` with the axis of each pair: time, rows or columns, by `mrope_section`. `takes_turns`: in turn,
    not in runs."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling") or JsonFields({}, fields.where)
    runs = section.integers("mrope_section", 0, _MAX_RUN) or ((24, 20, 20) if takes_turns else (16, 24, 24))
    num_pairs = rope.rotary_dim // 2
    if len(runs) != 3 or sum(runs) != num_pairs:
        raise section.error("mrope_section", f"must be three numbers with the sum {num_pairs}")
    if takes_turns:
        axes = tuple(pair % 3 if pair < 3 * runs[pair % 3] else 0 for pair in range(num_pairs))
    else:
        axes = tuple(axis for axis, count in enumerate(runs) for _ in range(count))
    return replace(rope, axes=axes)


def longest_context_len(fields: JsonFields, rope: RopeConfig) -> int:
    """Return the model's length, or that of YaRN: configs of Qwen add the scaling and leave max_position_embeddings."""
    own_len = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    sections = (fields, fields.section("rope_parameters"), fields.section("rope_scaling"))
    is_stated = any(section is not None and section.has(_ORIGINAL_LEN) for section in sections)
    if rope.scaling is not RopeScaling.YARN or not is_stated:
        return own_len
    return max(own_len, min(int(rope.factor * rope.original_context_len), MAX_CONTEXT))


def read_rope_pair(fields: JsonFields, head_dim: int, *, thetas: tuple[float, float]) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotations of layers with full attention and with a window. `thetas`: their defaults. Older configs
    have `rope_theta` and `rope_scaling` for the former, `rope_local_base_freq` for the latter."""
    if head_dim % 2:
        raise fields.error("head_dim", "must rotate a positive, even number of dimensions")
    sections = fields.section("rope_parameters") or JsonFields({}, "config.json")
    if sections.has("rope_type") or sections.has("rope_theta"):
        raise fields.error("rope_parameters", "must hold full_attention and sliding_attention")
    full = sections.section("full_attention") or fields.section("rope_scaling") or JsonFields({}, "config.json")
    windowed = sections.section("sliding_attention") or JsonFields({}, "config.json")
    full_theta = full.number("rope_theta", 1.0, _MAX_THETA, fields.number("rope_theta", 1.0, _MAX_THETA, thetas[0]))
    local_theta = fields.number("rope_local_base_freq", 1.0, _MAX_THETA, thetas[1])
    windowed_theta = windowed.number("rope_theta", 1.0, _MAX_THETA, local_theta)
    return (
        scaled_rope(fields, full, RopeConfig(theta=full_theta, rotary_dim=head_dim)),
        scaled_rope(fields, windowed, RopeConfig(theta=windowed_theta, rotary_dim=head_dim)),
    )


def scaled_rope(fields: JsonFields, section: JsonFields, rope: RopeConfig) -> RopeConfig:
    """Return `rope` with the scaling that `section` describes; `fields` is the whole of config.json."""
    kind = _kind(section)
    # Words have plain positions under mrope; "dynamic" changes only positions beyond max_position_embeddings.
    if (kind == "mrope" and section.has("mrope_section")) or kind == "dynamic":
        kind = RopeScaling.NONE.value
    if kind in _OLD_NAMES_OF_LONG and section.has("long_factor"):
        kind = RopeScaling.LONG.value
    if kind not in [scaling.value for scaling in RopeScaling]:
        names = ", ".join(scaling.value for scaling in _READERS)
        raise UnsupportedModel(f"RoPE scaling {kind!r} is not supported (only {names} are).")
    scaling = RopeScaling(kind)
    if scaling is RopeScaling.NONE:
        return rope
    return _READERS[scaling](fields, section, replace(rope, scaling=scaling))


def _kind(section: JsonFields) -> str:
    return section.text("rope_type", section.text("type", "default"))


def _proportional(fields: JsonFields, section: JsonFields, rope: RopeConfig) -> RopeConfig:
    share = section.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    factor = section.number("factor", 1.0, _MAX_FACTOR, 1.0)
    return replace(rope, factor=factor, num_turned=int(share * rope.rotary_dim // 2))


def _linear(fields: JsonFields, section: JsonFields, rope: RopeConfig) -> RopeConfig:
    return replace(rope, factor=section.number("factor", 1.0, _MAX_FACTOR))


def _llama3(fields: JsonFields, section: JsonFields, rope: RopeConfig) -> RopeConfig:
    low = section.number("low_freq_factor", 1e-3, _MAX_FACTOR)
    high = section.number("high_freq_factor", 1e-3, _MAX_FACTOR)
    if high <= low:
        raise section.error("high_freq_factor", "must be above low_freq_factor")
    rope = replace(_linear(fields, section, rope), low_freq_factor=low, high_freq_factor=high)
    return replace(rope, original_context_len=_original_context_len(fields, section))


def _yarn(fields: JsonFields, section: JsonFields, rope: RopeConfig) -> RopeConfig:
    original_len = _original_context_len(fields, section)
    if rope.theta <= 1.0:
        raise section.error("rope_theta", "must be above 1 with yarn")
    factor = _factor(fields, section, original_len)
    slow = section.number("beta_slow", 1e-3, _MAX_FACTOR, 1.0)
    fast = section.number("beta_fast", 1e-3, _MAX_FACTOR, 32.0)
    if fast < slow:
        raise section.error("beta_fast", "must not be below beta_slow")
    default = _yarn_angle_factor(section, factor)
    return replace(
        rope,
        factor=factor,
        original_context_len=original_len,
        beta_fast=fast,
        beta_slow=slow,
        has_whole_bounds=section.flag("truncate", True),
        angle_factor=section.number("attention_factor", 1e-3, _MAX_FACTOR, default),
    )


def _yarn_angle_factor(section: JsonFields, factor: float) -> float:
    above = section.number("mscale", 0.0, _MAX_FACTOR, 0.0)
    below = section.number("mscale_all_dim", 0.0, _MAX_FACTOR, 0.0)
    if above and below:
        return yarn_angle_factor(factor, above) / yarn_angle_factor(factor, below)
    return yarn_angle_factor(factor)


def yarn_angle_factor(factor: float, weight: float = 1.0) -> float:
    """Return the number by which YaRN multiplies cosines and sines: weight * 0.1 ln(factor) + 1."""
    return weight * 0.1 * math.log(factor) + 1.0


def _long(fields: JsonFields, section: JsonFields, rope: RopeConfig) -> RopeConfig:
    original_len = _original_context_len(fields, section)
    factor = _factor(fields, section, original_len)
    default = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(max(original_len, 2)))
    num_pairs = rope.rotary_dim // 2
    return replace(
        rope,
        factor=factor,
        original_context_len=original_len,
        short_divisors=section.numbers("short_factor", num_pairs, 1e-3, _MAX_FACTOR),
        long_divisors=section.numbers("long_factor", num_pairs, 1e-3, _MAX_FACTOR),
        is_long=fields.integer("max_position_embeddings", 1, MAX_CONTEXT) > original_len,
        angle_factor=section.number("attention_factor", 1e-3, _MAX_FACTOR, default),
    )


def _factor(fields: JsonFields, section: JsonFields, original_len: int) -> float:
    ratio = fields.integer("max_position_embeddings", 1, MAX_CONTEXT) / original_len
    return section.number("factor", 1.0, _MAX_FACTOR, max(ratio, 1.0))


def _original_context_len(fields: JsonFields, section: JsonFields) -> int:
    own_len = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    return fields.integer(_ORIGINAL_LEN, 1, MAX_CONTEXT, section.integer(_ORIGINAL_LEN, 1, MAX_CONTEXT, own_len))


_OLD_NAMES_OF_LONG = ("su", "yarn")
_READERS: dict[RopeScaling, Callable[[JsonFields, JsonFields, RopeConfig], RopeConfig]] = {
    RopeScaling.LINEAR: _linear,
    RopeScaling.LLAMA3: _llama3,
    RopeScaling.YARN: _yarn,
    RopeScaling.LONG: _long,
    RopeScaling.PROPORTIONAL: _proportional,
}
