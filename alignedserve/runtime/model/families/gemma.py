"""Reads what configs of Gemma 3n and 4 say beyond Gemma 3: layer embeddings, shared keys, streams, heads by layer."""

import math
from dataclasses import replace

from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.decoder.decoder_parts import ExpertConfig
from alignedserve.runtime.model.decoder.layer_extras import HeadSizes, LayerExtras
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.hf_fields import MAX_EXPERTS, MAX_HEADS, MAX_VOCABULARY, MAX_WIDTH
from alignedserve.runtime.model.rope_fields import read_rope_pair

_MAX_STREAMS = 16
_NUM_SPARSE, _SPARSITY = 10, 0.95  # of the first layers of Gemma 3n, if it has more
_THETAS = (1e6, 1e4)  # without windows, with them


def gemma3n(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    """Add Gemma 3n's parts; its text alone is read."""
    num_layers, heads = config.num_layers, HeadSizes(config.num_kv_heads, config.head_dim)
    if fields.integer("altup_active_idx", 0, _MAX_STREAMS, 0) != 0:
        raise UnsupportedModel("altup_active_idx other than 0 is not supported.")
    sizes = fields.integer_of_each("intermediate_size", num_layers, 1, MAX_WIDTH)
    sparse = (_SPARSITY,) * (_NUM_SPARSE if num_layers > _NUM_SPARSE else 0)
    sparsities = (*sparse, *(0.0,) * (num_layers - len(sparse)))
    if fields.has("activation_sparsity_pattern"):
        sparsities = fields.numbers("activation_sparsity_pattern", num_layers, 0.0, 1.0 - 1e-6)
    extras = LayerExtras(
        windowed_heads=heads,
        full_heads=heads,
        num_shared=_num_shared(config, fields, 15),
        inner_sizes=sizes,
        sparsities=sparsities if any(sparsities) else (),
        embedding_width=fields.integer("hidden_size_per_layer_input", 1, MAX_WIDTH, 256),
        embedding_vocab=fields.integer("vocab_size_per_layer_input", 1, MAX_VOCABULARY, 262144),
        num_streams=fields.integer("altup_num_inputs", 2, _MAX_STREAMS, 4),
        laurel_rank=fields.integer("laurel_rank", 1, MAX_WIDTH, 64),
        scales_corrected=fields.flag("altup_correct_scale", True),
    )
    return replace(_scaled(config, fields, 30.0), extras=extras)


def gemma4(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    """Add Gemma 4's parts."""
    if fields.has("use_bidirectional_attention") and fields.text("use_bidirectional_attention") != "vision":
        raise UnsupportedModel("use_bidirectional_attention other than vision is not supported.")
    num_layers = config.num_layers
    windowed = tuple(layer for layer in config.windowed_layers if layer != num_layers - 1)  # the last one never is
    config = replace(config, windowed_layers=windowed, sliding_window=config.sliding_window if windowed else None)
    repeats = fields.flag("attention_k_eq_v", False)
    windowed_heads = HeadSizes(config.num_kv_heads, config.head_dim)
    full_heads = _full_heads(config, fields, windowed_heads, repeats=repeats)
    num_shared = _num_shared(config, fields, 0)
    inner, sizes = config.intermediate_size, tuple[int, ...]()
    if num_shared and fields.flag("use_double_wide_mlp", False):
        sizes = (inner,) * (num_layers - num_shared) + (2 * inner,) * num_shared
    width = fields.integer("hidden_size_per_layer_input", 0, MAX_WIDTH, 256) if _is_given(fields) else 0
    extras = LayerExtras(
        windowed_heads=windowed_heads if windowed else full_heads,
        full_heads=full_heads,
        num_shared=num_shared,
        repeats_keys=repeats,
        inner_sizes=sizes,
        embedding_width=width,
        embedding_vocab=fields.integer("vocab_size_per_layer_input", 1, MAX_VOCABULARY, 262144) if width else 0,
        has_scales=True,
        picture_token=fields.integer("pad_token_id", 0, MAX_VOCABULARY, 0),
        pictures_in_windows=fields.has("use_bidirectional_attention"),
    )
    if config.num_heads % full_heads.num_kv_heads:
        raise fields.error("num_global_key_value_heads", "must divide num_attention_heads")
    config = replace(
        config,
        num_kv_heads=extras.windowed_heads.num_kv_heads,
        head_dim=extras.windowed_heads.head_dim,
        rope=read_rope_pair(fields, full_heads.head_dim, thetas=_THETAS)[0],
        extras=extras,
    )
    return _scaled(config, fields, None)


def gemma4_experts(fields: JsonFields, num_layers: int) -> ExpertConfig | None:
    """Read Gemma 4's experts, beside which every layer has its feed-forward part."""
    if not fields.flag("enable_moe_block", False):
        return None
    num_experts = fields.integer("num_experts", 1, MAX_EXPERTS)
    return ExpertConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("top_k_experts", 1, num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", 1, MAX_WIDTH),
        normalises=True,
        is_beside=True,
    )


def _is_given(fields: JsonFields) -> bool:
    name = "hidden_size_per_layer_input"
    return fields.has(name) or not fields.is_present(name)


def _scaled(config: ModelConfig, fields: JsonFields, cap: float | None) -> ModelConfig:
    name = "final_logit_softcapping"
    if fields.has(name):
        cap = fields.number(name, 1e-3, 1e6)
    elif fields.is_present(name):
        cap = None
    return replace(
        config,
        embedding_multiplier=math.sqrt(config.hidden_size),
        logits_cap=cap,
    )


def _num_shared(config: ModelConfig, fields: JsonFields, default: int) -> int:
    """Return how many of the last layers have no keys and values; before them there is a layer of each of their kinds
    that has."""
    count = fields.integer("num_kv_shared_layers", 0, config.num_layers - 1, min(default, config.num_layers - 1))
    own = range(config.num_layers - count)
    kinds = [layer in config.windowed_layers for layer in range(config.num_layers)]
    if set(kinds) - {kinds[layer] for layer in own}:
        raise fields.error("num_kv_shared_layers", "must leave a layer of each kind with keys and values")
    return count


def _full_heads(config: ModelConfig, fields: JsonFields, windowed: HeadSizes, *, repeats: bool) -> HeadSizes:
    overrides = fields.section("per_layer_config")
    if overrides is None:
        kv_heads = windowed.num_kv_heads
        if repeats:
            kv_heads = fields.integer("num_global_key_value_heads", 1, MAX_HEADS, kv_heads)
        return HeadSizes(kv_heads, fields.integer("global_head_dim", 1, MAX_WIDTH, 512))
    found = {}
    for name in overrides.names():
        own = overrides.section(name)
        if not name.isdecimal() or own is None or set(own.names()) - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModel("per_layer_config may give layers head_dim and num_key_value_heads alone.")
        kv_heads = own.integer("num_key_value_heads", 1, MAX_HEADS, windowed.num_kv_heads)
        found[int(name)] = HeadSizes(kv_heads, own.integer("head_dim", 1, MAX_WIDTH, windowed.head_dim))
    full = [layer for layer in range(config.num_layers) if layer not in config.windowed_layers]
    sizes = {found.pop(layer, windowed) for layer in full}
    if found or len(sizes) != 1:
        raise UnsupportedModel("per_layer_config must give all layers without a window the same heads, and no others.")
    return sizes.pop()
