"""Tensor names of each model family. A new family is one entry here and one parser of its config."""

from dataclasses import dataclass, replace

from alignedserve.runtime.model.model_config import Family


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """Names of modules below `prefixes[i]` (a layer's: below `layer`); `.weight` and `.bias` follow each."""

    prefixes: tuple[str, ...]  # the first one under which the embedding is found
    embedding: str
    final_norm: str
    lm_heads: tuple[str, ...]  # full names; the first one that exists
    layer: str  # with {layer}
    attention_norm: str
    mlp_norm: str
    qkv: tuple[str, ...]  # three modules, or one of all rows
    output: str
    gate_up: tuple[str, ...]  # gate and up, one module of both, or up alone
    down: str
    interleaves_heads: bool = False  # the rows of the one module lie [num_heads, 3, head_dim]
    positions: str = ""  # learned positions
    project_in: str = ""
    project_out: str = ""
    query_norm: str = ""
    key_norm: str = ""
    router: str = ""  # of a mixture of experts
    expert_gate_up: tuple[str, ...] = ()  # with {expert}
    expert_down: str = ""
    attention_post_norm: str = ""
    mlp_post_norm: str = ""


_LLAMA = ParameterNames(
    prefixes=("model.", ""),
    embedding="embed_tokens",
    final_norm="norm",
    lm_heads=("lm_head",),
    layer="layers.{layer}.",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
)

_MIXTRAL = replace(
    _LLAMA,
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    expert_down="block_sparse_moe.experts.{expert}.w2",
)

_QWEN3_MOE = replace(
    _LLAMA,
    router="mlp.gate",
    expert_gate_up=("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    expert_down="mlp.experts.{expert}.down_proj",
)

_PHI3 = replace(_LLAMA, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))

_GEMMA3 = replace(
    _LLAMA,
    prefixes=("model.", "language_model.model.", "model.language_model.", ""),
    mlp_norm="pre_feedforward_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

_OPT = ParameterNames(
    prefixes=("model.decoder.", "decoder."),
    embedding="embed_tokens",
    final_norm="final_layer_norm",
    lm_heads=("lm_head",),
    layer="layers.{layer}.",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    gate_up=("fc1",),
    down="fc2",
    positions="embed_positions",
    project_in="project_in",
    project_out="project_out",
)

_GPT_NEOX = ParameterNames(
    prefixes=("gpt_neox.", ""),
    embedding="embed_in",
    final_norm="final_layer_norm",
    lm_heads=("embed_out", "lm_head"),
    layer="layers.{layer}.",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("attention.query_key_value",),
    interleaves_heads=True,
    output="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)

PARAMETER_NAMES: dict[Family, ParameterNames] = {
    Family.OPT: _OPT,
    Family.LLAMA: _LLAMA,
    Family.MISTRAL: _LLAMA,
    Family.QWEN2: _LLAMA,
    Family.QWEN3: _LLAMA,
    Family.GPT_NEOX: _GPT_NEOX,
    Family.MIXTRAL: _MIXTRAL,
    Family.QWEN3_MOE: _QWEN3_MOE,
    Family.PHI3: _PHI3,
    Family.GRANITE: _LLAMA,
    Family.GEMMA3_TEXT: _GEMMA3,
    Family.GEMMA3: _GEMMA3,
}
