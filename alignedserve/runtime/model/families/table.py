"""Every family of decoders that is read. A family of known parts is a row, beside its like."""

from dataclasses import replace

from alignedserve.runtime.model.decoder.decoder_parts import Activation, HeadNormKind, NormKind
from alignedserve.runtime.model.families import experts
from alignedserve.runtime.model.families import form as states
from alignedserve.runtime.model.families.dense import DENSE, LLAMA, OLMO2, QWEN3
from alignedserve.runtime.model.families.form import (
    NO_WINDOW,
    FamilyForm,
    Flag,
    Named,
    WindowRule,
    all_but_every,
    every_layer,
    from_max_window_layer,
    layers_unless_rope,
    layers_without_rope,
    rotated_layers,
)
from alignedserve.runtime.model.families.names import NAMES
from alignedserve.runtime.model.families.readers import (
    falcon_h1,
    granite,
    granite_hybrid,
    lfm2,
    lfm2_moe,
    llama4,
    nemotron_h,
    read_latent,
    read_qwen_vl,
    read_with_images,
)
from alignedserve.runtime.model.hf_fields import DEFAULT_WINDOW

_MIXTRAL = replace(
    LLAMA,
    title="Mixtral",
    names=NAMES["mixtral"],
    num_kv_heads=8,
    theta=1e6,
    windows=WindowRule(every_layer),
    experts=experts.mixtral,
)
_QWEN3_MOE = replace(
    QWEN3,
    title="Qwen3-MoE",
    names=NAMES["qwen3_moe"],
    num_kv_heads=4,
    head_dim=None,
    windows=WindowRule(every_layer, DEFAULT_WINDOW, is_on=False),
    experts=experts.qwen3,
)
_DEEPSEEK_V3 = replace(
    LLAMA,
    title="DeepSeek V3, V3.1, R1",
    names=NAMES["deepseek_v3"],
    refused=("attention_bias",),
    latent=read_latent,
    mlp_bias=False,
    experts=experts.deepseek_v3,
)
_GRANITE_MOE = replace(
    LLAMA, title="Granite 3 with experts", names=NAMES["granite_moe"], experts=experts.granite, adapt=granite
)
_LLAMA4 = replace(
    LLAMA,
    title="Llama 4",
    names=NAMES["llama4"],
    num_kv_heads=8,
    head_dim=128,
    theta=5e5,
    windows=WindowRule(rotated_layers, 8192, name="attention_chunk_size", kind="chunked_attention"),
    has_chunked_windows=True,
    unrotated=layers_without_rope,
    head_norm=HeadNormKind.UNSCALED,
    has_head_norm=Flag("use_qk_norm", default=True),
    mlp_bias=False,
    dense_size="intermediate_size_mlp",
    experts=experts.llama4,
    norm_eps=Named("rms_norm_eps", 1e-5),
    adapt=llama4,
)

MIXTURES: dict[str, FamilyForm] = {
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe": replace(
        _QWEN3_MOE,
        title="Qwen3-VL with experts, with pictures",
        names=NAMES["qwen_vl_moe"],
        read=read_qwen_vl,
        num_kv_heads=16,
        theta=5e5,
        windows=NO_WINDOW,
        experts=experts.qwen3_vl,
    ),
    "qwen2_moe": replace(
        LLAMA,
        title="Qwen1.5-MoE, Qwen2-MoE",
        names=NAMES["qwen2_moe"],
        refused=("use_sliding_window",),
        num_kv_heads=16,
        qkv_bias=Flag("qkv_bias", default=True),
        output_bias=False,
        experts=experts.qwen2,
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "minimax_m2": replace(
        LLAMA,
        title="MiniMax-M2",
        names=NAMES["minimax_m2"],
        num_kv_heads=8,
        head_dim=128,
        head_norm=HeadNormKind.WHOLE,
        qkv_bias=False,
        output_bias=False,
        experts=experts.minimax,
    ),
    "gpt_oss": replace(
        LLAMA,
        title="gpt-oss",
        names=NAMES["gpt_oss"],
        num_kv_heads=8,
        head_dim=64,
        theta=150000.0,
        windows=WindowRule(all_but_every(2), 128),
        has_sinks=True,
        qkv_bias=Flag("attention_bias", default=True),
        output_bias=Flag("attention_bias", default=True),
        experts=experts.gpt_oss,
        activation=Activation.CLAMPED_SILU,
        norm_eps=Named("rms_norm_eps", 1e-5),
    ),
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        title="DeepSeek V2, V2.5, V2-Lite",
        names=NAMES["deepseek_v2"],
        refused=("attention_bias", "mlp_bias", "norm_topk_prob"),
        experts=experts.deepseek_v2,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": replace(_DEEPSEEK_V3, title="Kimi K2"),
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3, title="GLM-4.7-Flash", experts=experts.glm4_lite, norm_eps=Named("rms_norm_eps", 1e-5)
    ),
    "olmoe": replace(
        LLAMA,
        title="OLMoE",
        names=NAMES["qwen3_moe"],
        refused=("clip_qkv",),
        head_norm=HeadNormKind.WHOLE,
        experts=experts.olmoe,
        norm_eps=Named("rms_norm_eps", 1e-5),
    ),
    "flex_olmo": replace(
        OLMO2,
        title="FlexOlmo",
        names=NAMES["flex_olmo"],
        theta=5e5,
        experts=experts.flex_olmo,
        norm_eps=Named("rms_norm_eps", 1e-6),
    ),
    "glm4_moe": replace(
        LLAMA,
        title="GLM-4.5, GLM-4.6",
        names=NAMES["glm4_moe"],
        num_kv_heads=8,
        rotated=Named("partial_rotary_factor", 0.5),
        head_norm=HeadNormKind.HEADS,
        has_head_norm=Flag("use_qk_norm"),
        output_bias=False,
        experts=experts.glm4,
        norm_eps=Named("rms_norm_eps", 1e-5),
    ),
    "solar_open": replace(
        LLAMA,
        title="Solar Open",
        names=NAMES["glm4_moe"],
        defaults=(("intermediate_size", 1280),),  # no layer is dense
        num_kv_heads=8,
        head_dim=128,
        theta=1e6,
        output_bias=False,
        experts=experts.solar_open,
        norm_eps=Named("rms_norm_eps", 1e-5),
    ),
    "llama4_text": _LLAMA4,
    "llama4": replace(_LLAMA4, title="Llama 4, with pictures", read=read_with_images),
    "dots1": replace(
        LLAMA,
        title="dots.llm1",
        names=NAMES["glm4_moe"],
        num_kv_heads=32,
        windows=WindowRule(from_max_window_layer(62), DEFAULT_WINDOW),
        head_norm=HeadNormKind.HEADS,
        experts=experts.deepseek,
    ),
}


_LFM2 = replace(
    LLAMA,
    title="LFM2",
    names=NAMES["lfm2"],
    defaults=(("intermediate_size", 12288),),
    num_kv_heads=8,
    theta=1e6,
    states=states.short_convolutions,
    head_norm=HeadNormKind.HEADS,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    norm_eps=Named("norm_eps", 1e-5),
    ties_embeddings=True,
    adapt=lfm2,
)
_QWEN3_NEXT = replace(
    LLAMA,
    title="Qwen3-Next",
    names=NAMES["qwen3_next"],
    num_kv_heads=2,
    head_dim=256,
    rotated=Named("partial_rotary_factor", 0.25),
    states=states.mixed_delta_rule,
    head_norm=HeadNormKind.HEADS,
    has_attention_gate=True,
    experts=experts.qwen3_next,
    mlp_bias=False,
    norm=NormKind.RMS_PLUS_ONE,
)
_QWEN3_5 = replace(
    _QWEN3_NEXT, title="Qwen3.5", names=NAMES["qwen3_5"], num_kv_heads=4, states=states.delta_rule, experts=None
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    title="Qwen3.5 with experts",
    defaults=(("intermediate_size", 512),),  # no layer is dense
    num_kv_heads=2,
    experts=experts.qwen3_5,
)

HYBRIDS: dict[str, FamilyForm] = {
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2, title="LFM2 with experts", names=NAMES["lfm2_moe"], defaults=(), experts=experts.lfm2, adapt=lfm2_moe
    ),
    "granitemoehybrid": replace(
        LLAMA,
        title="Granite 4",
        names=NAMES["granite_hybrid"],
        unrotated=layers_unless_rope,
        states=states.mamba2,
        mlp_bias=False,
        experts=experts.granite_hybrid,
        adapt=granite_hybrid,
    ),
    "bamba": replace(
        LLAMA,
        title="Bamba",
        names=NAMES["bamba"],
        num_kv_heads=8,
        rotated=Named("partial_rotary_factor", 0.5),
        states=states.mamba2,
        norm_eps=Named("rms_norm_eps", 1e-5),
    ),
    "nemotron_h": replace(
        LLAMA,
        title="Nemotron-H, Nemotron 3",
        names=NAMES["nemotron_h"],
        defaults=(("num_hidden_layers", 1), ("intermediate_size", 21504)),  # the former is worked out
        refused=("moe_latent_size", "sliding_window"),
        num_kv_heads=8,
        head_dim=128,
        states=states.nemotron,
        activation=Named("mlp_hidden_act", "relu2"),
        is_gated=False,
        qkv_bias=False,
        output_bias=False,
        experts=experts.nemotron_h,
        norm_eps=Named("layer_norm_epsilon", 1e-5),
        adapt=nemotron_h,
    ),
    "falcon_h1": replace(
        LLAMA,
        title="Falcon-H1",
        names=NAMES["bamba"],
        refused=("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias", "quantization_config"),
        num_kv_heads=8,
        states=states.mamba2_beside,
        norm_eps=Named("rms_norm_eps", 1e-5),
        adapt=falcon_h1,
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5": replace(_QWEN3_5, title="Qwen3.5 with images (its text part)", read=read_with_images),
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5_moe": replace(
        _QWEN3_5_MOE, title="Qwen3.5 with experts and images (its text part)", read=read_with_images
    ),
}


FAMILIES: dict[str, FamilyForm] = {**DENSE, **MIXTURES, **HYBRIDS}
