"""Readers of config.json: one by the form of a family, which names differences from Llama, and older ones."""

import math
from dataclasses import replace

from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.decoder.decoder_parts import (
    Activation,
    ExpertConfig,
    HeadNormKind,
    HeadSizes,
    LatentConfig,
    LayerExtras,
    NormKind,
    ProductMultipliers,
    RopeConfig,
    RopeScaling,
    TemperatureConfig,
)
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.form import FamilyForm, holds, nemotron_layers
from alignedserve.runtime.model.hf_fields import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    SharedSizes,
    default_head_dim,
    longest_context_len,
    read_activation,
    read_dtype,
    read_num_kv_heads,
    read_rope,
    read_rope_pair,
    read_sizes,
    with_axes,
    yarn_angle_factor,
)


def read_decoder(fields: JsonFields, model_type: str, form: FamilyForm) -> ModelConfig:
    """Read the config of a family that `form` describes."""
    fields = fields.with_defaults(dict(form.defaults)) if form.defaults else fields
    for name in form.refused:
        if fields.is_set(name):
            raise UnsupportedModel(f"{name} of {model_type} is not supported.")
    sizes = read_sizes(fields, model_type)
    num_heads, num_layers = sizes["num_heads"], sizes["num_layers"]
    latent = None if form.latent is None else form.latent(fields)
    head_dim = _head_dim(fields, sizes, form) if latent is None else latent.row_width
    window, windowed = form.windows.read(fields, num_layers)
    states = None if form.states is None else form.states(fields, sizes)
    rope, windowed_rope = _ropes(fields, head_dim if latent is None else latent.rope_dim, form)
    sizes["max_position_embeddings"] = longest_context_len(fields, rope)
    config = ModelConfig(
        **sizes,
        intermediate_size=_inner_size(fields, num_layers, form),
        num_kv_heads=1 if latent else read_num_kv_heads(fields, num_heads, form.num_kv_heads or num_heads),
        head_dim=head_dim,
        activation=_activation(fields, form),
        norm=form.norm,
        norm_eps=fields.number(form.norm_eps.name, 0.0, 1.0, float(form.norm_eps.default)),
        embedding_size=sizes["hidden_size"],
        rope=rope,
        windowed_rope=windowed_rope,
        sliding_window=window,
        windowed_layers=windowed,
        has_chunked_windows=form.has_chunked_windows and window is not None,
        unrotated_layers=() if form.unrotated is None else form.unrotated(fields, num_layers, windowed),
        is_gated=form.is_gated,
        has_qkv_bias=holds(form.qkv_bias, fields),
        has_output_bias=holds(form.output_bias, fields),
        has_mlp_bias=form.experts is None and holds(form.mlp_bias, fields),
        latent=latent,
        state=states.state if states and states.layers else None,
        state_layers=states.layers if states else (),
        query_multiplier=1.0 if latent is None else _latent_scale(fields, latent, rope),
        score_cap=_cap(fields, "attn_logit_softcapping", 50.0) if form.has_caps else None,
        logits_cap=_cap(fields, "final_logit_softcapping", 30.0) if form.has_caps else None,
        has_attention_gate=form.has_attention_gate,
        has_sinks=form.has_sinks,
        head_norm=form.head_norm if holds(form.has_head_norm, fields) else HeadNormKind.NONE,
        has_input_norms=form.has_input_norms,
        has_post_norms=form.has_post_norms,
        has_parallel_residual=holds(form.parallel_residual, fields),
        has_one_input_norm=form.names.mlp_norm == form.names.attention_norm,
        ties_embeddings=fields.flag("tie_word_embeddings", form.ties_embeddings),
        experts=None if form.experts is None else form.experts(fields, num_layers),
    )
    return config if form.adapt is None else form.adapt(config, fields)


def _inner_size(fields: JsonFields, num_layers: int, form: FamilyForm) -> int:
    if form.has_size_lists:
        return max(fields.integer_of_each(form.dense_size, num_layers, 1, MAX_WIDTH))
    return fields.integer(form.dense_size, 1, MAX_WIDTH)


def _activation(fields: JsonFields, form: FamilyForm) -> Activation:
    if isinstance(form.activation, Activation):
        return form.activation
    return read_activation(fields, form.activation.name, str(form.activation.default))


def _head_dim(fields: JsonFields, sizes: SharedSizes, form: FamilyForm) -> int:
    if fields.has("head_dim") or form.head_dim is not None:
        return fields.integer("head_dim", 1, MAX_WIDTH, form.head_dim)
    return default_head_dim(fields, sizes)


def _ropes(fields: JsonFields, head_dim: int, form: FamilyForm) -> tuple[RopeConfig, RopeConfig | None]:
    if form.has_rope_pair:
        return read_rope_pair(fields, head_dim, thetas=(form.theta, form.windowed_theta))
    default = fields.integer("rotary_dim", 1, head_dim, head_dim) / head_dim if fields.has("rotary_dim") else None
    rotated = fields.number(form.rotated.name, 0.0, 1.0, default or float(form.rotated.default))
    return read_rope(fields, head_dim, default_fraction=rotated, default_theta=form.theta), None


def read_latent(fields: JsonFields) -> LatentConfig:
    """Read the widths of latent attention; a `q_lora_rank` of null is none."""
    has_query_rank = fields.has("q_lora_rank") or not fields.is_present("q_lora_rank")
    return LatentConfig(
        rank=fields.integer("kv_lora_rank", 1, MAX_WIDTH, 512),
        rope_dim=fields.integer("qk_rope_head_dim", 2, MAX_WIDTH, 64),
        nope_dim=fields.integer("qk_nope_head_dim", 1, MAX_WIDTH, 128),
        value_dim=fields.integer("v_head_dim", 1, MAX_WIDTH, 128),
        query_rank=fields.integer("q_lora_rank", 1, MAX_WIDTH, 1536) if has_query_rank else None,
    )


def _latent_scale(fields: JsonFields, latent: LatentConfig, rope: RopeConfig) -> float:
    if not fields.flag("rope_interleave", True):
        raise UnsupportedModel("rope_interleave=false is not supported.")
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    scale = math.sqrt(latent.row_width / latent.query_dim)
    if section is None or rope.scaling is RopeScaling.NONE:
        return scale
    weight = section.number("mscale_all_dim", 0.0, 1e6, 0.0)
    return scale * yarn_angle_factor(rope.factor, weight) ** 2 if weight else scale


def _cap(fields: JsonFields, name: str, default: float) -> float | None:
    if fields.is_present(name) and not fields.has(name):
        return None
    return fields.number(name, 1e-3, 1e6, default)


def read_opt(fields: JsonFields, model_type: str, form: FamilyForm) -> ModelConfig:
    sizes = read_sizes(fields, model_type)
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


def read_with_images(fields: JsonFields, model_type: str, form: FamilyForm) -> ModelConfig:
    """Read the text part of a model that sees as well; what holds for both parts stands outside."""
    text = fields.section("text_config")
    if text is None:
        raise fields.error("text_config", "is missing")
    shared = {
        "dtype": read_dtype(fields, "bfloat16"),
        "eos_token_id": list(fields.token_ids("eos_token_id", MAX_VOCABULARY)),
    }
    return read_decoder(text.with_defaults(shared), model_type, form)


def read_idefics3(fields: JsonFields, model_type: str, form: FamilyForm) -> ModelConfig:
    _require_text(fields, model_type, "llama")
    config = read_with_images(fields, model_type, form)
    return replace(config, ties_embeddings=fields.flag("tie_word_embeddings", False))


def read_pixtral(fields: JsonFields, model_type: str, form: FamilyForm) -> ModelConfig:
    _require_text(fields, model_type, "mistral")
    config = read_with_images(fields, model_type, form)
    return replace(config, ties_embeddings=fields.flag("tie_word_embeddings", config.ties_embeddings))


def read_qwen_vl(fields: JsonFields, model_type: str, form: FamilyForm) -> ModelConfig:
    """Read the text part of Qwen's models; of Qwen2.5-VL its fields stand outside in published configs."""
    text = fields.section("text_config") or fields
    shared = {
        "dtype": read_dtype(fields, "bfloat16"),
        "eos_token_id": list(fields.token_ids("eos_token_id", MAX_VOCABULARY)),
    }
    config = read_decoder(text.with_defaults(shared), model_type, form)
    assert config.rope is not None, "a decoder whose queries are not rotated"
    is_tied = fields.flag("tie_word_embeddings", False)
    rope = with_axes(text, config.rope, takes_turns=model_type.startswith("qwen3"))
    return replace(config, rope=rope, ties_embeddings=is_tied)


def _require_text(fields: JsonFields, model_type: str, text_type: str) -> None:
    text = fields.section("text_config")
    if text is not None and text.text("model_type", text_type) != text_type:
        raise UnsupportedModel(f"text_config of {model_type} other than {text_type} is not supported.")


# --- what is added


def granite(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    multiplier = fields.number("attention_multiplier", 1e-6, 1e6, 1.0)
    return replace(
        config,
        embedding_multiplier=fields.number("embedding_multiplier", 1e-6, 1e6, 1.0),
        query_multiplier=multiplier * math.sqrt(config.head_dim),
        residual_multiplier=fields.number("residual_multiplier", 1e-6, 1e6, 1.0),
        logits_divisor=fields.number("logits_scaling", 1e-6, 1e6, 1.0),
    )


def gemma(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    activation = Activation.GELU_TANH if config.activation is Activation.GELU else config.activation
    return replace(config, activation=activation, embedding_multiplier=math.sqrt(config.hidden_size))


def gemma3(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    width = fields.number("query_pre_attn_scalar", 1e-3, 1e6, 256.0)
    return replace(
        config, embedding_multiplier=math.sqrt(config.hidden_size), query_multiplier=math.sqrt(config.head_dim / width)
    )


def llama4(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    if not fields.flag("attn_temperature_tuning", True):
        return config
    step, scale = fields.number("floor_scale", 1.0, 1e9, 8192.0), fields.number("attn_scale", 0.0, 1e6, 0.1)
    return replace(config, temperature=TemperatureConfig(step, scale))


def cohere(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    return replace(config, logits_divisor=1.0 / fields.number("logit_scale", 1e-6, 1e6, 0.0625))


def lfm2(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    ties = fields.flag("tie_embedding", config.ties_embeddings)
    inner = fields.integer("block_ff_dim", 1, MAX_WIDTH, config.intermediate_size)
    if fields.flag("block_auto_adjust_ff_dim", True):
        step = fields.integer("block_multiple_of", 1, MAX_WIDTH, 256)
        inner = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * (2 * inner // 3))
        inner = -(-inner // step) * step
    return replace(config, intermediate_size=inner, ties_embeddings=ties)


def lfm2_moe(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    return replace(config, ties_embeddings=fields.flag("tie_embedding", config.ties_embeddings))


def granite_hybrid(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    inner = fields.integer("shared_intermediate_size", 1, MAX_WIDTH, 1024)
    return replace(granite(config, fields), intermediate_size=inner)


def nemotron_h(config: ModelConfig, fields: JsonFields) -> ModelConfig:
    """Put the parts of Nemotron-H, which files have apart, together to layers."""
    layers = nemotron_layers(fields)
    if layers.of_kind("moe") and fields.flag("mlp_bias", False):
        raise UnsupportedModel(f"{fields.where}: mlp_bias is not supported beside experts.")
    return replace(
        config,
        num_layers=len(layers.mixers),
        unrotated_layers=tuple(range(len(layers.mixers))),
        bare_layers=layers.of_kind(None),
        has_one_input_norm=False,
        parts_in_files=layers.in_files,
    )


def falcon_h1(config: ModelConfig, fields: JsonFields) -> ModelConfig:

    def factor(name: str) -> float:
        return fields.number(name, -1e6, 1e6, 1.0)

    def factors(name: str, count: int) -> tuple[float, ...]:
        return fields.numbers(name, count, -1e6, 1e6) if fields.has(name) else (1.0,) * count

    attended, inputs = factor("attention_in_multiplier"), factor("ssm_in_multiplier")
    gates, values, b, c, steps = (inputs * multiplier for multiplier in factors("ssm_multipliers", 5))
    gate, down = factors("mlp_multipliers", 2)
    return replace(
        config,
        mixes_beside=True,
        embedding_multiplier=factor("embedding_multiplier"),
        logits_divisor=1.0 / fields.number("lm_head_multiplier", 1e-6, 1e6, 1.0),
        multipliers=ProductMultipliers(
            queries=attended,
            keys=attended * factor("key_multiplier"),
            values=attended,
            mixer_inputs=(gates, values, b, c, steps),
            attended=factor("attention_out_multiplier"),
            mixed=factor("ssm_out_multiplier"),
            gates=gate,
            down=down,
        ),
    )


_MAX_STREAMS = 16
_NUM_SPARSE, _SPARSITY = 10, 0.95  # of the first layers of Gemma 3n, if it has more
_THETAS = (1e6, 1e4)  # without windows, with them


def gemma3n(config: ModelConfig, fields: JsonFields) -> ModelConfig:
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
    name = "hidden_size_per_layer_input"
    width = fields.integer(name, 0, MAX_WIDTH, 256) if fields.has(name) or not fields.is_present(name) else 0
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


def _scaled(config: ModelConfig, fields: JsonFields, cap: float | None) -> ModelConfig:
    name = "final_logit_softcapping"
    if fields.has(name):
        cap = fields.number(name, 1e-3, 1e6)
    elif fields.is_present(name):
        cap = None
    return replace(config, embedding_multiplier=math.sqrt(config.hidden_size), logits_cap=cap)


def _num_shared(config: ModelConfig, fields: JsonFields, default: int) -> int:
    """Return how many of the last layers have no keys and values. An earlier layer of each kind must have some."""
    count = fields.integer("num_kv_shared_layers", 0, config.num_layers - 1, min(default, config.num_layers - 1))
    cached = range(config.num_layers - count)
    kinds = [layer in config.windowed_layers for layer in range(config.num_layers)]
    if set(kinds) - {kinds[layer] for layer in cached}:
        raise fields.error("num_kv_shared_layers", "must leave a layer of each kind with keys and values")
    return count


def _full_heads(config: ModelConfig, fields: JsonFields, windowed: HeadSizes, *, repeats: bool) -> HeadSizes:
    overrides = fields.section("per_layer_config")
    if overrides is None:
        kv_heads = windowed.num_kv_heads
        if repeats:
            kv_heads = fields.integer("num_global_key_value_heads", 1, MAX_HEADS, kv_heads)
        return HeadSizes(kv_heads, fields.integer("global_head_dim", 1, MAX_WIDTH, 512))
    heads = {}
    for name in overrides.names():
        override = overrides.section(name)
        if not name.isdecimal() or override is None or set(override.names()) - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModel("per_layer_config may give layers head_dim and num_key_value_heads alone.")
        kv_heads = override.integer("num_key_value_heads", 1, MAX_HEADS, windowed.num_kv_heads)
        heads[int(name)] = HeadSizes(kv_heads, override.integer("head_dim", 1, MAX_WIDTH, windowed.head_dim))
    full = [layer for layer in range(config.num_layers) if layer not in config.windowed_layers]
    sizes = {heads.pop(layer, windowed) for layer in full}
    if heads or len(sizes) != 1:
        raise UnsupportedModel("per_layer_config must give all layers without a window the same heads, and no others.")
    return sizes.pop()
