"""The names of tensors in a GGUF file, and the check that the file has no others: one unread would change answers."""

from collections.abc import Iterator
from dataclasses import replace

from alignedserve.core.errors import UnsupportedModel
from alignedserve.gguf.file import GgufFile, GgufTensor
from alignedserve.runtime.model.decoder.decoder_parts import HeadNormKind
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.gguf.rope import FREQUENCY_FACTORS, LONG_DIVISORS, SHORT_DIVISORS
from alignedserve.runtime.model.weight_names import ParameterNames

# The tensors of experts lie side by side in one of three dimensions: of `blk.0.ffn_up_exps.7`, that is number 7.
_EXPERTS = "_exps."
GGUF_NAMES = ParameterNames(
    prefixes=("",),
    embedding="token_embd",
    final_norm="output_norm",
    lm_heads=("output",),
    layer="blk.{layer}.",
    attention_norm="attn_norm",
    mlp_norm="ffn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    output="attn_output",
    gate_up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    attention_post_norm="post_attention_norm",
    mlp_post_norm="post_ffw_norm",
    router="ffn_gate_inp",
    expert_gate_up=("ffn_gate_exps.{expert}", "ffn_up_exps.{expert}"),
    expert_down="ffn_down_exps.{expert}",
)
# Beside the tensors of layers; the first is in old files, which need it no more.
_OTHERS = ("blk.{layer}.attn_rot_embd.weight",)
_ROPE = (FREQUENCY_FACTORS, SHORT_DIVISORS, LONG_DIVISORS)


def tensor_names(file: GgufFile) -> ParameterNames:
    """Return the names in this file: queries, keys and values may be one tensor, and so may gate and up."""
    names = GGUF_NAMES
    if "blk.0.attn_qkv.weight" in file.tensors:
        names = replace(names, qkv=("attn_qkv",))
    if "blk.0.ffn_gate.weight" not in file.tensors:
        names = replace(names, gate_up=("ffn_up",))
    return names


def find_tensor(file: GgufFile, name: str) -> GgufTensor | None:
    module, found, rest = name.partition(_EXPERTS)
    if not found:
        return file.tensors.get(name)
    stacked = file.tensors.get(f"{module}{_EXPERTS}weight")
    index = int(rest.partition(".")[0])
    if stacked is None or len(stacked.shape) != 3 or index >= stacked.shape[0]:
        return None
    return stacked.part(index)


def check_names(file: GgufFile, config: ModelConfig) -> None:
    unknown = set(file.tensors) - set(_expected(config, tensor_names(file)))
    if unknown:
        first = min(unknown)
        raise UnsupportedModel(
            f"{file.path}: tensor {first[:80]} is not one of this architecture as it is known here "
            f"({len(unknown)} such tensors); without it answers would be wrong."
        )


def _expected(config: ModelConfig, names: ParameterNames) -> Iterator[str]:
    yield from (f"{name}.weight" for name in (names.embedding, names.final_norm, *names.lm_heads))
    yield from _ROPE
    with_bias = set()
    with_bias |= set(names.qkv) if config.has_qkv_bias else set()
    with_bias |= {names.output} if config.has_output_bias else set()
    with_bias |= {*names.gate_up, names.down} if config.has_mlp_bias else set()
    for layer in range(config.num_layers):
        prefix = names.layer.format(layer=layer)
        yield from (other.format(layer=layer) for other in _OTHERS)
        for module in _modules(config, names, layer):
            yield f"{prefix}{module}.weight"
            if module in with_bias:
                yield f"{prefix}{module}.bias"


def _modules(config: ModelConfig, names: ParameterNames, layer: int) -> Iterator[str]:
    yield from (names.attention_norm, names.mlp_norm, *names.qkv, names.output)
    if config.head_norm is not HeadNormKind.NONE:
        yield from (names.query_norm, names.key_norm)
    if config.has_post_norms:
        yield from (names.attention_post_norm, names.mlp_post_norm)
    if config.experts_of(layer) is None:
        yield from (*names.gate_up, names.down)
    else:
        yield names.router
        yield from (module.partition(".")[0] for module in (*names.expert_gate_up, names.expert_down))
