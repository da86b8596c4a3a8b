"""What a family of decoders has, as a row of the table describes it: its tensors' names, and its config's meaning."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.decoder.decoder_parts import (
    Activation,
    ExpertConfig,
    HeadNormKind,
    LatentConfig,
    NormKind,
)
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.decoder.state_config import DeltaConfig, ShortConvConfig, SpaceConfig, StateConfig
from alignedserve.runtime.model.hf_fields import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    SharedSizes,
    read_activation,
)
from alignedserve.runtime.model.weight_names import ParameterNames

_MAX_KERNEL = 64
_OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of Nemotron-H


class StateLayers(NamedTuple):
    """The layers with a state, and of which kind it is."""

    state: StateConfig
    layers: tuple[int, ...]


def short_convolutions(fields: JsonFields, sizes: SharedSizes) -> StateLayers:
    """Read LFM2's: the layers beside those of full attention."""
    num_layers = sizes["num_layers"]
    if fields.has("layer_types"):
        layers = layers_of_kind(fields.texts("layer_types", MAX_LAYERS), num_layers, "conv", "full_attention")
    else:
        attending = fields.integers("full_attn_idxs", 0, num_layers - 1)
        is_named = fields.has("full_attn_idxs")
        layers = tuple(layer for layer in range(num_layers) if is_named and layer not in attending)
    size = fields.integer("conv_L_cache", 2, _MAX_KERNEL, 3)
    return checked(ShortConvConfig(sizes["hidden_size"], size, fields.flag("conv_bias", False)), layers, sizes)


def layers_of_kind(layer_types: tuple[str, ...], num_layers: int, kind: str, other: str) -> tuple[int, ...]:
    """Return the layers of a kind. Raises UnsupportedModel where a layer is neither `kind` nor `other`."""
    kinds = [_OLDER_NAMES.get(layer_type, layer_type) for layer_type in layer_types]
    if len(kinds) != num_layers or not set(kinds) <= {kind, other}:
        raise UnsupportedModel(f"layer_types must name {other} or {kind} for every layer.")
    return tuple(layer for layer, layer_kind in enumerate(kinds) if layer_kind == kind)


def checked(state: StateConfig, layers: tuple[int, ...], sizes: SharedSizes) -> StateLayers:
    """Return the layers, of which one at least must attend: blocks count its keys and values."""
    if len(layers) == sizes["num_layers"]:
        raise UnsupportedModel(f"a model of {state.title} alone, without any layer of attention, is not supported.")
    return StateLayers(state, layers)


def _check_activation(fields: JsonFields, name: str = "hidden_act") -> None:
    if read_activation(fields, name, "silu") is not Activation.SILU:
        raise UnsupportedModel(f"{fields.where}: {name} other than silu is not supported beside layers with a state.")


def mamba2(fields: JsonFields, sizes: SharedSizes) -> StateLayers:
    """Read the layers of Mamba-2 beside attention: of Granite 4 by `layer_types`, of Bamba by those that attend."""
    num_layers = sizes["num_layers"]
    kinds = fields.texts("layer_types", MAX_LAYERS) or fields.texts("layers_block_type", MAX_LAYERS)
    if kinds:
        layers = layers_of_kind(kinds, num_layers, "linear_attention", "full_attention")
    else:
        attending = fields.integers("attn_layer_indices", 0, num_layers - 1)
        layers = tuple(layer for layer in range(num_layers) if layer not in attending)
    inner = fields.integer("mamba_expand", 1, 64, 2) * sizes["hidden_size"]
    return checked(_space(fields, inner), layers, sizes)


def _space(fields: JsonFields, inner: int) -> SpaceConfig:
    _check_activation(fields)
    num_heads = fields.integer("mamba_n_heads", 1, MAX_HEADS, 128)
    num_groups = fields.integer("mamba_n_groups", 1, num_heads, 1)
    if inner % num_heads:
        raise fields.error("mamba_n_heads", "must divide the width of the layer")
    if num_heads % num_groups:
        raise fields.error("mamba_n_groups", "must divide mamba_n_heads")
    return SpaceConfig(
        num_heads=num_heads,
        head_dim=inner // num_heads,
        num_groups=num_groups,
        state_size=fields.integer("mamba_d_state", 1, MAX_WIDTH, 256),
        kernel_size=fields.integer("mamba_d_conv", 2, _MAX_KERNEL, 4),
        has_conv_bias=fields.flag("mamba_conv_bias", True),
        has_product_bias=fields.flag("mamba_proj_bias", False),
        dt_limits=fields.interval("time_step_limit", (0.0, math.inf)),
    )


def delta_rule(fields: JsonFields, sizes: SharedSizes) -> StateLayers:
    """Read Qwen3.5's layers of the gated delta rule: by `layer_types`, or all but every fourth."""
    _check_activation(fields)
    num_layers = sizes["num_layers"]
    kinds = fields.texts("layer_types", MAX_LAYERS)
    if kinds:
        layers = layers_of_kind(kinds, num_layers, "linear_attention", "full_attention")
    else:
        interval = fields.integer("full_attention_interval", 1, MAX_LAYERS, 4)
        layers = tuple(layer for layer in range(num_layers) if (layer + 1) % interval)
    num_key_heads = fields.integer("linear_num_key_heads", 1, MAX_HEADS, 16)
    num_heads = fields.integer("linear_num_value_heads", 1, MAX_HEADS, 32)
    if num_heads % num_key_heads:
        raise fields.error("linear_num_key_heads", "must divide linear_num_value_heads")
    state = DeltaConfig(
        num_key_heads=num_key_heads,
        key_dim=fields.integer("linear_key_head_dim", 1, MAX_WIDTH, 128),
        num_heads=num_heads,
        value_dim=fields.integer("linear_value_head_dim", 1, MAX_WIDTH, 128),
        kernel_size=fields.integer("linear_conv_kernel_dim", 2, _MAX_KERNEL, 4),
        has_mixed_rows=False,
    )
    return checked(state, layers, sizes)


def mixed_delta_rule(fields: JsonFields, sizes: SharedSizes) -> StateLayers:
    """Read Qwen3-Next's, whose products have their rows key head by key head."""
    state, layers = delta_rule(fields, sizes)
    assert isinstance(state, DeltaConfig), "another kind of state"
    return StateLayers(replace(state, has_mixed_rows=True), layers)


class NemotronLayers(NamedTuple):
    """Nemotron-H's layers, of which files have the two parts apart: a mixer, and mostly a feed-forward part behind."""

    mixers: tuple[str, ...]  # kind of each layer's
    feed_forwards: tuple[str | None, ...]  # likewise; None: it has none
    in_files: tuple[tuple[int, int], ...]  # the numbers of both parts; the first twice where there is no second

    def of_kind(self, kind: str | None) -> tuple[int, ...]:
        """Return the layers with a part of this kind; None: layers without a feed-forward part."""
        feed_forwards = self.feed_forwards if kind in (None, "mlp", "moe") else self.mixers
        return tuple(layer for layer, each in enumerate(feed_forwards) if each == kind)


def nemotron_layers(fields: JsonFields) -> NemotronLayers:
    kinds = fields.texts("layers_block_type", MAX_LAYERS) or fields.texts("layer_types", MAX_LAYERS)
    if not kinds:
        pattern = fields.text("hybrid_override_pattern")
        kinds = tuple(_LETTERS.get(letter, letter) for letter in pattern[:MAX_LAYERS])
    mixers: list[str] = []
    feed_forwards: list[str | None] = []
    in_files: list[tuple[int, int]] = []
    for number, kind in enumerate(_OLDER_NAMES.get(each, each) for each in kinds):
        if kind in ("linear_attention", "full_attention"):
            mixers, feed_forwards = [*mixers, kind], [*feed_forwards, None]
            in_files.append((number, number))
        elif kind in ("mlp", "moe") and mixers and feed_forwards[-1] is None:
            feed_forwards[-1], in_files[-1] = kind, (in_files[-1][0], number)
        else:
            raise UnsupportedModel(f"part {number} of nemotron_h is {kind!r}, which cannot be where it stands.")
    return NemotronLayers(tuple(mixers), tuple(feed_forwards), tuple(in_files))


def nemotron(fields: JsonFields, sizes: SharedSizes) -> StateLayers:
    _check_activation(fields, "mamba_hidden_act")
    layers = nemotron_layers(fields)
    num_heads = fields.integer("mamba_num_heads", 1, MAX_HEADS, 128)
    num_groups = fields.integer("n_groups", 1, num_heads, 8)
    if num_heads % num_groups:
        raise fields.error("n_groups", "must divide mamba_num_heads")
    state = SpaceConfig(
        num_heads=num_heads,
        head_dim=fields.integer("mamba_head_dim", 1, MAX_WIDTH, 64),
        num_groups=num_groups,
        state_size=fields.integer("ssm_state_size", 1, MAX_WIDTH, 128),
        kernel_size=fields.integer("conv_kernel", 2, _MAX_KERNEL, 4),
        has_conv_bias=fields.flag("use_conv_bias", True),
        has_product_bias=fields.flag("use_bias", False),
        dt_limits=(fields.number("time_step_min", 0.0, 1e6, 1e-3), math.inf),
    )
    return checked(state, layers.of_kind("linear_attention"), {**sizes, "num_layers": len(layers.mixers)})


def mamba2_beside(fields: JsonFields, sizes: SharedSizes) -> StateLayers:
    """Read Falcon-H1's: Mamba-2 on every layer, beside attention."""
    expanded = fields.integer("mamba_expand", 1, 64, 2) * sizes["hidden_size"]
    has_width = fields.has("mamba_d_ssm") or not fields.is_present("mamba_d_ssm")
    inner = fields.integer("mamba_d_ssm", 1, MAX_WIDTH, 1024) if has_width else expanded
    state = replace(
        _space(fields, inner),
        has_norm=fields.flag("mamba_rms_norm", False),
        gates_first=not fields.flag("mamba_norm_before_gate", True),
    )
    return StateLayers(state, tuple(range(sizes["num_layers"])))


Layers = tuple[int, ...]


def every_layer(fields: JsonFields, num_layers: int) -> Layers:
    return tuple(range(num_layers))


def from_max_window_layer(default: int) -> Callable[[JsonFields, int], Layers]:
    return lambda fields, count: tuple(range(fields.integer("max_window_layers", 0, MAX_LAYERS, default), count))


def _all_but_every(nth: int, fields: JsonFields, num_layers: int) -> Layers:
    name = "_sliding_window_pattern" if fields.has("_sliding_window_pattern") else "sliding_window_pattern"
    pattern = fields.integer(name, 1, MAX_LAYERS, nth)
    return tuple(layer for layer in range(num_layers) if (layer + 1) % pattern)


def all_but_every(nth: int) -> Callable[[JsonFields, int], Layers]:
    """Return the rule by which all layers have a window but the n-th, 2n-th …; a config may name another n."""
    return partial(_all_but_every, nth)


def all_but_first_of_four(fields: JsonFields, num_layers: int) -> Layers:
    return tuple(layer for layer in range(num_layers) if layer % 4)


def layers_without_rope(fields: JsonFields, num_layers: int, windowed: Layers = ()) -> Layers:
    if fields.has("no_rope_layers"):
        marks = fields.numbers("no_rope_layers", num_layers, 0.0, 1.0)
        return tuple(layer for layer in range(num_layers) if not marks[layer])
    interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, 4)
    return tuple(layer for layer in range(num_layers) if (layer + 1) % interval == 0)


def layers_without_window(fields: JsonFields, num_layers: int, windowed: Layers) -> Layers:
    return tuple(layer for layer in range(num_layers) if layer not in windowed)


def layers_beside_windows(fields: JsonFields, num_layers: int, windowed: Layers) -> Layers:
    return layers_without_window(fields, num_layers, windowed) if windowed else ()


@dataclass(frozen=True, slots=True)
class WindowRule:
    """How a config says which layers have a window, and how long it is."""

    layers: Callable[[JsonFields, int], Layers] | None  # without layer_types; None: the family knows no windows
    default_size: int | None = None  # without sliding_window; None: there is no window then
    is_on: bool = True  # without use_sliding_window
    name: str = "sliding_window"  # of its size
    kind: str = "sliding_attention"  # among layer_types

    def read(self, fields: JsonFields, num_layers: int) -> tuple[int | None, Layers]:
        if self.layers is None or not fields.flag("use_sliding_window", self.is_on):
            return None, ()
        if not fields.has(self.name) and (self.default_size is None or fields.is_present(self.name)):
            return None, ()
        window = fields.integer(self.name, 1, MAX_CONTEXT, self.default_size)
        layers = windowed_layers(fields, num_layers, self.kind)
        if layers is None:
            layers = self.layers(fields, num_layers)
        return (window, layers) if layers else (None, ())


NO_WINDOW = WindowRule(None)


def rotated_layers(fields: JsonFields, num_layers: int) -> Layers:
    unrotated = layers_without_rope(fields, num_layers)
    return tuple(layer for layer in range(num_layers) if layer not in unrotated)


def windowed_layers(fields: JsonFields, num_layers: int, kind: str = "sliding_attention") -> Layers | None:
    """Return the layers that `layer_types` gives a window; None: it is absent."""
    layer_types = fields.texts("layer_types", MAX_LAYERS)
    if not layer_types:
        return None
    if set(layer_types) - {"full_attention", kind} or len(layer_types) != num_layers:
        raise UnsupportedModel(f"layer_types must name full_attention or {kind} for every layer.")
    return tuple(layer for layer, layer_kind in enumerate(layer_types) if layer_kind == kind)


def layers_unless_rope(fields: JsonFields, num_layers: int, windowed: Layers) -> Layers:
    return () if fields.text("position_embedding_type", "nope") == "rope" else tuple(range(num_layers))


class Flag(NamedTuple):
    """A flag of config.json, and its default."""

    name: str
    default: bool = False

    def read(self, fields: JsonFields) -> bool:
        return fields.flag(self.name, self.default)


class Named(NamedTuple):
    """A field of config.json by another name than Llama's, or with another default."""

    name: str
    default: str | float


_WHOLE = Named("partial_rotary_factor", 1.0)
_SILU = Named("hidden_act", "silu")
_EPS = Named("rms_norm_eps", 1e-6)
_ATTENTION_BIAS, _MLP_BIAS = Flag("attention_bias"), Flag("mlp_bias")


@dataclass(frozen=True, slots=True)
class FamilyForm:
    """One family. Fields left out are Llama's; defaults are those of transformers."""

    title: str  # as its makers call the models
    names: ParameterNames
    read: Callable[[JsonFields, str, "FamilyForm"], ModelConfig]  # of the fields and the model_type
    defaults: tuple[tuple[str, object], ...] = ()  # fields that published configs leave out
    refused: tuple[str, ...] = ()  # flags and numbers that may not be set: what they turn on is not there

    # Attention
    num_kv_heads: int | None = None  # without num_key_value_heads; None: as many as heads
    head_dim: int | None = None  # without head_dim; None: the width divided among the heads
    theta: float = 10000.0
    rotated: Named = _WHOLE  # the share of each head
    windows: WindowRule = NO_WINDOW
    has_chunked_windows: bool = False
    # The layers without rotation, by the fields, the number of layers and those with a window.
    unrotated: Callable[[JsonFields, int, tuple[int, ...]], tuple[int, ...]] | None = None
    latent: Callable[[JsonFields], LatentConfig] | None = None  # in place of keys and values of heads
    states: Callable[[JsonFields, SharedSizes], StateLayers] | None = None  # of layers that do not attend
    has_attention_gate: bool = False
    has_sinks: bool = False
    has_caps: bool = False  # of scores and of logits
    has_rope_pair: bool = False  # layers with a window have a rotation of their own
    windowed_theta: float = 10000.0  # of that one
    head_norm: HeadNormKind = HeadNormKind.NONE
    has_head_norm: Flag | bool = True  # False: there is no such norm after all
    qkv_bias: Flag | bool = _ATTENTION_BIAS
    output_bias: Flag | bool = _ATTENTION_BIAS

    # Feed-forward part
    activation: Named | Activation = _SILU  # one that no field names: whatever the config says
    is_gated: bool = True
    mlp_bias: Flag | bool = _MLP_BIAS
    dense_size: str = "intermediate_size"
    has_size_lists: bool = False  # it may be a list, of each layer's
    experts: Callable[[JsonFields, int], ExpertConfig | None] | None = None  # of the fields and the number of layers

    # Norms and the stream between layers
    norm: NormKind = NormKind.RMS
    norm_eps: Named = _EPS
    has_input_norms: bool = True
    has_post_norms: bool = False
    parallel_residual: Flag | bool = False
    ties_embeddings: bool = False  # without tie_word_embeddings
    adapt: Callable[[ModelConfig, JsonFields], ModelConfig] | None = None  # adds multipliers and the like


def holds(flag: Flag | bool, fields: JsonFields) -> bool:
    return flag if isinstance(flag, bool) else flag.read(fields)
