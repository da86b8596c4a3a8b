"""Tensor names of each model family. A new family is one entry here and one parser of its config."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from alignedserve.runtime.model.model_config import ExpertConfig, Family, ModelConfig


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


class LinearModule(NamedTuple):
    """The matrix of one module, as the files have it."""

    name: str
    rows: int
    width: int
    is_expert: bool = False


def find_prefix(names: ParameterNames, has: Callable[[str], bool]) -> str:
    """Return the prefix under which the embedding is found; otherwise the first."""
    return next((prefix for prefix in names.prefixes if has(f"{prefix}{names.embedding}.weight")), names.prefixes[0])


def find_head(names: ParameterNames, has: Callable[[str], bool]) -> str:
    """Return the name of the language-model head that is found; otherwise the first."""
    return next((name for name in names.lm_heads if has(f"{name}.weight")), names.lm_heads[0])


def linear_modules(
    config: ModelConfig, names: ParameterNames, prefix: str, has: Callable[[str], bool]
) -> Iterator[LinearModule]:
    """Yield every module that multiplies, an untied head included."""
    for layer in range(config.num_layers):
        in_layer = prefix + names.layer.format(layer=layer)
        yield from _attention_modules(config, names, in_layer)
        experts = config.experts_of(layer)
        if experts is None:
            yield from _feed_forward(in_layer, names.gate_up, names.down, config, config.intermediate_size)
        else:
            yield from _expert_modules(config, names, in_layer, experts)
    if config.embedding_size != config.hidden_size:
        yield LinearModule(prefix + names.project_in, config.hidden_size, config.embedding_size)
        yield LinearModule(prefix + names.project_out, config.embedding_size, config.hidden_size)
    if not config.ties_embeddings:
        yield LinearModule(find_head(names, has), config.vocab_size, config.embedding_size)


def _attention_modules(config: ModelConfig, names: ParameterNames, prefix: str) -> Iterator[LinearModule]:
    rows = [config.query_width, config.kv_width, config.kv_width]
    rows = rows if len(names.qkv) == len(rows) else [sum(rows)]
    for name, count in zip(names.qkv, rows, strict=True):
        yield LinearModule(prefix + name, count, config.hidden_size)
    yield LinearModule(prefix + names.output, config.hidden_size, config.query_width)


def _feed_forward(
    prefix: str, gate_up: tuple[str, ...], down: str, config: ModelConfig, inner: int, *, is_expert: bool = False
) -> Iterator[LinearModule]:
    rows = inner * (2 if config.is_gated else 1) // len(gate_up)
    for name in gate_up:
        yield LinearModule(prefix + name, rows, config.hidden_size, is_expert)
    yield LinearModule(prefix + down, config.hidden_size, inner, is_expert)


def _expert_modules(
    config: ModelConfig, names: ParameterNames, prefix: str, experts: ExpertConfig
) -> Iterator[LinearModule]:
    for index in range(experts.num_experts):
        gate_up = tuple(name.format(expert=index) for name in names.expert_gate_up)
        down = names.expert_down.format(expert=index)
        yield from _feed_forward(prefix, gate_up, down, config, experts.intermediate_size, is_expert=True)
