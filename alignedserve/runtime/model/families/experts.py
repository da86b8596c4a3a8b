"""Reads what config.json says of a mixture of experts."""

from dataclasses import replace
from functools import partial
from typing import Any

from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.decoder.decoder_parts import ExpertConfig, Scoring
from alignedserve.runtime.model.families.form import nemotron_layers
from alignedserve.runtime.model.hf_fields import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH

_GLM4: dict[str, Any] = {
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_GLM4_LITE: dict[str, Any] = {
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
}
_NEMOTRON_H = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "norm_topk_prob": True}
_DEEPSEEK_V3: dict[str, Any] = {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


def mixtral(fields: JsonFields, num_layers: int) -> ExpertConfig:
    num_experts = fields.integer("num_local_experts", 1, MAX_EXPERTS, 8)
    return ExpertConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 1, num_experts, 2),
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        normalises=True,
    )


def granite(fields: JsonFields, num_layers: int) -> ExpertConfig:
    return replace(mixtral(fields, num_layers), shared_size=fields.integer("shared_intermediate_size", 0, MAX_WIDTH, 0))


def gpt_oss(fields: JsonFields, num_layers: int) -> ExpertConfig:
    """Read those of gpt-oss, with biases; their gates are cut at a limit that the kernels know."""
    for name, known in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if fields.number(name, 0.0, 1e6, known) != known:
            raise UnsupportedModel(f"{name} of gpt_oss is {known}; others are not supported.")
    fields = fields.with_defaults({"num_local_experts": 128, "num_experts_per_tok": 4})
    return replace(mixtral(fields, num_layers), has_bias=True)


def llama4(fields: JsonFields, num_layers: int) -> ExpertConfig:
    step = fields.integer("interleave_moe_layer_step", 1, MAX_LAYERS, 1)
    mixed = set(range(step - 1, num_layers, step))
    if fields.has("moe_layers"):
        mixed = set(fields.integers("moe_layers", 0, num_layers - 1))
    experts = mixtral(fields.with_defaults({"num_local_experts": 16, "num_experts_per_tok": 1}), num_layers)
    return replace(
        experts,
        normalises=False,
        dense_layers=tuple(layer for layer in range(num_layers) if layer not in mixed),
        scoring=Scoring.SIGMOID,
        shared_size=experts.intermediate_size,
        scales_inputs=True,
    )


def minimax(fields: JsonFields, num_layers: int) -> ExpertConfig:
    num_experts = fields.integer("num_local_experts", 1, MAX_EXPERTS, 256)
    return replace(
        mixtral(
            fields.with_defaults({"num_local_experts": 256, "num_experts_per_tok": min(8, num_experts)}), num_layers
        ),
        scoring=Scoring.SIGMOID,
    )


def qwen3_vl(fields: JsonFields, num_layers: int) -> ExpertConfig:
    return replace(_qwen(fields, num_layers, num_experts=60, num_chosen=4, inner=1408), normalises=True)


def qwen2(fields: JsonFields, num_layers: int) -> ExpertConfig:
    return replace(
        _qwen(fields, num_layers, num_experts=60, num_chosen=4, inner=1408),
        shared_size=fields.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, 5632),
        has_shared_gate=True,
    )


def _qwen(fields: JsonFields, num_layers: int, *, num_experts: int, num_chosen: int, inner: int) -> ExpertConfig:
    num_experts = _num_experts(fields, num_experts)
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    dense_layers = set(fields.integers("mlp_only_layers", 0, num_layers - 1))
    dense_layers |= {layer for layer in range(num_layers) if (layer + 1) % step}
    return ExpertConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 1, num_experts, num_chosen),
        intermediate_size=fields.integer("moe_intermediate_size", 1, MAX_WIDTH, inner),
        normalises=fields.flag("norm_topk_prob", False),
        dense_layers=tuple(sorted(dense_layers)),
    )


def solar_open(fields: JsonFields, num_layers: int) -> ExpertConfig:
    return replace(deepseek(fields, num_layers, **{**_GLM4, "moe_intermediate_size": 1280}), dense_layers=())


def glm4_lite(fields: JsonFields, num_layers: int) -> ExpertConfig:
    kinds = fields.texts("mlp_layer_types", MAX_LAYERS) or ("dense", *["sparse"] * (num_layers - 1))
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise UnsupportedModel("mlp_layer_types must name dense or sparse for every layer.")
    dense_layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    experts = deepseek(fields, num_layers, **_GLM4_LITE)
    return replace(experts, dense_layers=dense_layers)


def deepseek_v2(fields: JsonFields, num_layers: int) -> ExpertConfig:
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"topk_method {method!r} is not one of greedy, group_limited_greedy.")
    experts = deepseek(fields, num_layers, n_routed_experts=64, n_shared_experts=2)
    if method == "greedy":
        experts = replace(experts, num_groups=1, num_chosen_groups=1)
    return replace(experts, scoring=Scoring.SOFTMAX)


def deepseek(fields: JsonFields, num_layers: int, **defaults: object) -> ExpertConfig:
    """Read a mixture as DeepSeek V3 has it. `defaults`: of fields that published configs leave out."""
    fields = fields.with_defaults(defaults)
    num_experts = fields.integer("n_routed_experts", 1, MAX_EXPERTS)
    num_groups = fields.integer("n_group", 1, num_experts, 1)
    if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < 2):
        raise fields.error("n_group", "must divide n_routed_experts into groups of two or more")
    num_chosen_groups = fields.integer("topk_group", 1, num_groups, 1)
    most = num_chosen_groups * (num_experts // num_groups)
    inner = fields.integer("moe_intermediate_size", 1, MAX_WIDTH, 1408)
    return ExpertConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 1, most),
        intermediate_size=inner,
        normalises=fields.flag("norm_topk_prob", False),
        dense_layers=tuple(range(fields.integer("first_k_dense_replace", 0, num_layers, 0))),
        scoring=Scoring.SIGMOID,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
        shared_size=inner * fields.integer("n_shared_experts", 0, MAX_EXPERTS, 0),
    )


def _olmo(fields: JsonFields, num_layers: int, *, num_experts: int, num_chosen: int) -> ExpertConfig:
    num_experts = _num_experts(fields, num_experts)
    return ExpertConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 1, num_experts, min(num_chosen, num_experts)),
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        normalises=fields.flag("norm_topk_prob", False),
    )


def _num_experts(fields: JsonFields, default: int) -> int:
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    return fields.integer(name, 1, MAX_EXPERTS, default)


def lfm2(fields: JsonFields, num_layers: int) -> ExpertConfig:
    if not fields.flag("use_expert_bias", True):
        raise UnsupportedModel("use_expert_bias=false of lfm2_moe is not supported.")
    num_experts = fields.integer("num_experts", 1, MAX_EXPERTS, 32)
    return ExpertConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 1, num_experts, min(4, num_experts)),
        intermediate_size=fields.integer("moe_intermediate_size", 1, MAX_WIDTH, 1792),
        normalises=fields.flag("norm_topk_prob", True),
        dense_layers=tuple(range(fields.integer("num_dense_layers", 0, num_layers, 2))),
        scoring=Scoring.SIGMOID,
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
    )


def granite_hybrid(fields: JsonFields, num_layers: int) -> ExpertConfig | None:
    if fields.has("num_local_experts") and fields.integer("num_local_experts", 0, MAX_EXPERTS) == 0:
        return None
    return granite(fields.with_defaults({"shared_intermediate_size": 1024}), num_layers)


def qwen3_next(fields: JsonFields, num_layers: int) -> ExpertConfig | None:
    if fields.has("num_experts") and fields.integer("num_experts", 0, MAX_EXPERTS) == 0:
        return None
    experts = _qwen(
        fields.with_defaults({"norm_topk_prob": True}), num_layers, num_experts=512, num_chosen=10, inner=512
    )
    shared = fields.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, 512)
    return replace(experts, shared_size=shared, has_shared_gate=True)


def qwen3_5(fields: JsonFields, num_layers: int) -> ExpertConfig | None:
    return qwen3_next(fields.with_defaults({"num_experts": 256, "num_experts_per_tok": 8}), num_layers)


def nemotron_h(fields: JsonFields, num_layers: int) -> ExpertConfig | None:
    """Read Nemotron-H's, which are not gated, on the layers that have some."""
    layers = nemotron_layers(fields)
    if not layers.of_kind("moe"):
        return None
    experts = deepseek(fields, num_layers, **_NEMOTRON_H)
    shared = fields.integer("moe_shared_expert_intermediate_size", 1, MAX_WIDTH, 7688)
    dense = tuple(layer for layer, kind in enumerate(layers.feed_forwards) if kind != "moe")
    return replace(experts, dense_layers=dense, shared_size=shared)


qwen3 = partial(_qwen, num_experts=128, num_chosen=8, inner=768)
glm4 = partial(deepseek, **_GLM4)
deepseek_v3 = partial(deepseek, **_DEEPSEEK_V3)
olmoe = partial(_olmo, num_experts=64, num_chosen=8)
flex_olmo = partial(_olmo, num_experts=7, num_chosen=5)
