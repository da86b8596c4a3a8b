"""Reads what config.json says of layers with a state."""

import math
from dataclasses import replace
from typing import NamedTuple

from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.decoder.decoder_parts import Activation
from alignedserve.runtime.model.decoder.state_config import DeltaConfig, ShortConvConfig, SpaceConfig, StateConfig
from alignedserve.runtime.model.hf_fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Sizes, read_activation

_MAX_KERNEL = 64
_OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of Nemotron-H


class StateLayers(NamedTuple):
    """The layers with a state, and of which kind it is."""

    state: StateConfig
    layers: tuple[int, ...]


def short_convolutions(fields: JsonFields, sizes: Sizes) -> StateLayers:
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
    """Return the layers that are of a kind; all others must be of the other one."""
    kinds = [_OLDER_NAMES.get(own, own) for own in layer_types]
    if len(kinds) != num_layers or not set(kinds) <= {kind, other}:
        raise UnsupportedModel(f"layer_types must name {other} or {kind} for every layer.")
    return tuple(layer for layer, own in enumerate(kinds) if own == kind)


def checked(state: StateConfig, layers: tuple[int, ...], sizes: Sizes) -> StateLayers:
    """Return the layers, of which one at least must attend: blocks count its keys and values."""
    if len(layers) == sizes["num_layers"]:
        raise UnsupportedModel(f"a model of {state.title} alone, without any layer of attention, is not supported.")
    return StateLayers(state, layers)


def _check_activation(fields: JsonFields, name: str = "hidden_act") -> None:
    if read_activation(fields, name, "silu") is not Activation.SILU:
        raise UnsupportedModel(f"{fields.where}: {name} other than silu is not supported beside layers with a state.")


def mamba2(fields: JsonFields, sizes: Sizes) -> StateLayers:
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


def delta_rule(fields: JsonFields, sizes: Sizes) -> StateLayers:
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


def mixed_delta_rule(fields: JsonFields, sizes: Sizes) -> StateLayers:
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
        """Return the layers of which one part is of this kind; None: those without a feed-forward part."""
        own = self.feed_forwards if kind in (None, "mlp", "moe") else self.mixers
        return tuple(layer for layer, each in enumerate(own) if each == kind)


def nemotron_layers(fields: JsonFields) -> NemotronLayers:
    """Read the parts, by their kinds or by a letter each."""
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


def nemotron(fields: JsonFields, sizes: Sizes) -> StateLayers:
    """Read Nemotron-H's layers of Mamba-2, which it names otherwise."""
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


def mamba2_beside(fields: JsonFields, sizes: Sizes) -> StateLayers:
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
