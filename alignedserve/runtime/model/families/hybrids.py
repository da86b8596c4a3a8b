"""Every family of decoders with layers that keep a state, by the `model_type` of its config.json."""

from dataclasses import replace

from alignedserve.runtime.model.decoder.decoder_parts import HeadNormKind, NormKind
from alignedserve.runtime.model.families import experts, names, states
from alignedserve.runtime.model.families.dense import LLAMA
from alignedserve.runtime.model.families.form import FamilyForm, Named
from alignedserve.runtime.model.families.readers import (
    falcon_h1,
    granite_hybrid,
    lfm2,
    lfm2_moe,
    nemotron_h,
    read_with_images,
)
from alignedserve.runtime.model.families.windows import layers_unless_rope

_LFM2 = replace(
    LLAMA,
    title="LFM2",
    names=names.LFM2,
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
    names=names.QWEN3_NEXT,
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
    _QWEN3_NEXT,
    title="Qwen3.5",
    names=names.QWEN3_5,
    num_kv_heads=4,
    states=states.delta_rule,
    experts=None,
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
        _LFM2, title="LFM2 with experts", names=names.LFM2_MOE, defaults=(), experts=experts.lfm2, adapt=lfm2_moe
    ),
    "granitemoehybrid": replace(
        LLAMA,
        title="Granite 4",
        names=names.GRANITE_HYBRID,
        unrotated=layers_unless_rope,
        states=states.mamba2,
        mlp_bias=False,
        experts=experts.granite_hybrid,
        adapt=granite_hybrid,
    ),
    "bamba": replace(
        LLAMA,
        title="Bamba",
        names=names.BAMBA,
        num_kv_heads=8,
        rotated=Named("partial_rotary_factor", 0.5),
        states=states.mamba2,
        norm_eps=Named("rms_norm_eps", 1e-5),
    ),
    "nemotron_h": replace(
        LLAMA,
        title="Nemotron-H, Nemotron 3",
        names=names.NEMOTRON_H,
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
        names=names.BAMBA,
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
