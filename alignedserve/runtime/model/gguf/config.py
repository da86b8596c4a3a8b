"""Makes a ModelConfig of a GGUF file's metadata and of the tensors that it has.

The names of tensors in a GGUF file, and the check that the file has no others: one unread would change answers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from alignedserve.core.errors import ModelError, UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.gguf.file import GgufFile, GgufTensor
from alignedserve.gguf.tensor_types import FLOAT_TYPES
from alignedserve.runtime.model.decoder.decoder_parts import (
    Activation,
    ExpertConfig,
    HeadNormKind,
    NormKind,
    RopeConfig,
    RopeScaling,
)
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.names import NAMES
from alignedserve.runtime.model.hf_fields import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    yarn_angle_factor,
)
from alignedserve.runtime.model.weight_names import ParameterNames
from kernels.block_values import unpack_rows

FREQUENCY_FACTORS = "rope_freqs.weight"
SHORT_DIVISORS, LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"
_MAX_FACTOR = 1e6
_ORIGINAL_LEN = "rope.scaling.original_context_length"
# Numbers of YaRN that llama.cpp changes in ways that no published family needs, and the values that change nothing.
_PLAIN_YARN = {"yarn_log_multiplier": 0.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0}


class RopeReader:
    """Reads the entries of one architecture."""

    def __init__(self, file: GgufFile, entries: JsonFields, architecture: str) -> None:
        self._file = file
        self._entries = entries
        self._prefix = architecture + "."

    def rope(self, rotary_dim: int) -> RopeConfig:
        rope = RopeConfig(
            theta=self._number("rope.freq_base", 1.0, 1e12, 10000.0),
            rotary_dim=rotary_dim,
            frequency_factors=self._divisors(FREQUENCY_FACTORS, rotary_dim),
        )
        if LONG_DIVISORS in self._file.tensors:
            original_len, own_len = self._original_len(), self._context_len()
            return replace(
                rope,
                scaling=RopeScaling.LONG,
                factor=max(own_len / original_len, 1.0),
                original_context_len=original_len,
                short_divisors=self._divisors(SHORT_DIVISORS, rope.rotary_dim),
                long_divisors=self._divisors(LONG_DIVISORS, rope.rotary_dim),
                is_long=own_len > original_len,
                angle_factor=self._angle_factor(),
            )
        kind = self._entries.text(self._prefix + "rope.scaling.type", "none")
        if kind == "yarn":
            return self._yarn(rope)
        factor = self._number("rope.scaling.factor", 0.0, _MAX_FACTOR, 0.0)
        # Files of old converters have the factor alone.
        factor = self._number("rope.scale_linear", 0.0, _MAX_FACTOR, factor)
        if kind not in ("none", "linear"):
            raise UnsupportedModel(f"{self._file.path}: RoPE scaling {kind!r} is not one of none, linear, yarn.")
        if kind == "none" and not self._entries.has(self._prefix + "rope.scale_linear"):
            return rope
        if factor in (0.0, 1.0):
            return rope
        return replace(rope, scaling=RopeScaling.LINEAR, factor=factor)

    def context_len(self, rope: RopeConfig) -> int:
        own_len = self._context_len()
        if rope.scaling is not RopeScaling.YARN or not self._entries.has(self._prefix + _ORIGINAL_LEN):
            return own_len
        return max(own_len, min(int(rope.factor * rope.original_context_len), MAX_CONTEXT))

    def _yarn(self, rope: RopeConfig) -> RopeConfig:
        for name, plain in _PLAIN_YARN.items():
            if self._number(f"rope.scaling.{name}", -_MAX_FACTOR, _MAX_FACTOR, plain) != plain:
                raise UnsupportedModel(f"{self._file.path}: {self._prefix}rope.scaling.{name} is not supported.")
        if rope.theta <= 1.0:
            raise self._entries.error(self._prefix + "rope.freq_base", "must be above 1 with yarn")
        factor = self._number("rope.scaling.factor", 1.0, _MAX_FACTOR)
        slow = self._number("rope.scaling.yarn_beta_slow", 1e-3, _MAX_FACTOR, 1.0)
        fast = self._number("rope.scaling.yarn_beta_fast", 1e-3, _MAX_FACTOR, 32.0)
        if fast < slow:
            raise self._entries.error(self._prefix + "rope.scaling.yarn_beta_fast", "must not be below yarn_beta_slow")
        return replace(
            rope,
            scaling=RopeScaling.YARN,
            factor=factor,
            original_context_len=self._original_len(),
            beta_fast=fast,
            beta_slow=slow,
            angle_factor=self._angle_factor() * yarn_angle_factor(factor),
        )

    def _angle_factor(self) -> float:
        return self._number("rope.scaling.attn_factor", 1e-3, _MAX_FACTOR, 1.0)

    def _divisors(self, name: str, rotary_dim: int) -> tuple[float, ...]:
        """Return the divisors of rotary frequencies in a tensor of Llama 3 or LongRoPE; none: it is not there."""
        tensor = self._file.tensors.get(name)
        if tensor is None:
            if name == SHORT_DIVISORS:
                raise ModelError(f"{self._file.path} holds no tensor {name} beside {LONG_DIVISORS}.")
            return ()
        if tensor.shape != (rotary_dim // 2,) or tensor.type.name != "F32":
            raise ModelError(f"{self._file.path}: tensor {name} is not F32 of {rotary_dim // 2} values.")
        divisors = unpack_rows(self._file.raw_rows(tensor), "F32")[0]
        if not bool(np.isfinite(divisors).all()) or float(divisors.min()) <= 0.0:
            raise ModelError(f"{self._file.path}: tensor {name} holds numbers that are not positive.")
        return tuple(float(divisor) for divisor in divisors)

    def _context_len(self) -> int:
        return self._entries.integer(self._prefix + "context_length", 1, MAX_CONTEXT)

    def _original_len(self) -> int:
        return self._entries.integer(self._prefix + _ORIGINAL_LEN, 1, MAX_CONTEXT, self._context_len())

    def _number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        return self._entries.number(self._prefix + name, low, high, default)


_EXPERTS = "_exps."
GGUF_NAMES = NAMES["gguf"]
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
    module, separator, rest = name.partition(_EXPERTS)
    if not separator:
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


EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
# Control tokens that end an answer as well, beside the metadata's.
_END_TOKENS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"})
_CONTROL = 3  # among tokenizer.ggml.token_type


@dataclass(frozen=True, slots=True)
class _Architecture:
    family: str
    expert_family: str | None = None  # of files with experts; None: there are none such
    has_qk_norm: bool = False
    rotates_parts: bool = False  # fewer dimensions than a head has, perhaps


_ARCHITECTURES = {
    "llama": _Architecture("llama", "mixtral"),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3", has_qk_norm=True),
    "qwen3moe": _Architecture("qwen3_moe", "qwen3_moe", has_qk_norm=True),
    "gemma3": _Architecture("gemma3_text", has_qk_norm=True),
    "phi3": _Architecture("phi3", rotates_parts=True),
    "granite": _Architecture("granite"),
}
# llama.cpp knows these of Gemma 3 by itself.
_GEMMA3_GLOBAL_EVERY = 6  # layers
_GEMMA3_WINDOWED_THETA = 10000.0
_GEMMA3_27B_LAYERS = 62  # the one size whose scores are not scaled by the width of a head


def gguf_config(file: GgufFile) -> ModelConfig:
    """Return the config of the model in the file. Raises UnsupportedModel naming what is not supported, ModelError."""
    entries = JsonFields(file.metadata, str(file.path))
    name = entries.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedModel(f"{file.path}: architecture {name!r} is not one of {', '.join(_ARCHITECTURES)}.")
    config = _Parser(file, entries, name).config()
    if config.family in _ADDITIONS:
        config = _ADDITIONS[config.family](config, entries)
    check_names(file, config)
    return config


def _gemma3(config: ModelConfig, entries: JsonFields) -> ModelConfig:
    assert config.rope is not None, "not rotated"
    window = entries.integer("gemma3.attention.sliding_window", 0, MAX_CONTEXT, 0)
    windowed = tuple(layer for layer in range(config.num_layers) if (layer + 1) % _GEMMA3_GLOBAL_EVERY)
    head_width = config.head_dim
    if config.num_layers == _GEMMA3_27B_LAYERS:
        head_width = config.hidden_size // config.num_heads
    return replace(
        config,
        activation=Activation.GELU_TANH,
        norm=NormKind.RMS_PLUS_ONE,
        sliding_window=window or None,
        windowed_layers=windowed if window else (),
        windowed_rope=RopeConfig(theta=_GEMMA3_WINDOWED_THETA, rotary_dim=config.rope.rotary_dim),
        has_post_norms=True,
        embedding_multiplier=math.sqrt(config.hidden_size),
        query_multiplier=math.sqrt(config.head_dim / head_width),
    )


def _phi3(config: ModelConfig, entries: JsonFields) -> ModelConfig:
    window = entries.integer("phi3.attention.sliding_window", 0, MAX_CONTEXT, 0)
    return replace(
        config, sliding_window=window or None, windowed_layers=tuple(range(config.num_layers)) if window else ()
    )


def _granite(config: ModelConfig, entries: JsonFields) -> ModelConfig:
    if not entries.flag("granite.rope.scaling.finetuned", True):
        raise UnsupportedModel("Granite without rotary positions (granite.rope.scaling.finetuned) is not supported.")
    scale = entries.number("granite.attention.scale", 0.0, 1e6, 0.0)
    return replace(
        config,
        embedding_multiplier=entries.number("granite.embedding_scale", 1e-6, 1e6, 1.0),
        query_multiplier=scale * math.sqrt(config.head_dim) if scale else 1.0,
        residual_multiplier=entries.number("granite.residual_scale", 1e-6, 1e6, 1.0),
        logits_divisor=entries.number("granite.logit_scale", 1e-6, 1e6, 1.0),
    )


_ADDITIONS = {"gemma3_text": _gemma3, "phi3": _phi3, "granite": _granite}


class _Parser:
    def __init__(self, file: GgufFile, entries: JsonFields, architecture: str) -> None:
        self._file = file
        self._entries = entries
        self._prefix = architecture + "."
        self._architecture = _ARCHITECTURES[architecture]
        self._rope_reader = RopeReader(file, entries, architecture)

    def config(self) -> ModelConfig:
        experts = self._experts()
        hidden_size = self._whole("embedding_length", 1, MAX_WIDTH)
        num_heads = self._whole("attention.head_count", 1, MAX_HEADS)
        num_kv_heads = self._whole("attention.head_count_kv", 1, num_heads, num_heads)
        if num_heads % num_kv_heads:
            raise self._error("attention.head_count_kv", "must divide the number of heads")
        head_dim = self._head_dim(hidden_size, num_heads)
        vocab_size = self._vocab_size(hidden_size)
        rope = self._rope_reader.rope(self._rotary_dim(head_dim))
        return ModelConfig(
            family=self._family(experts),
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=self._whole("feed_forward_length", 1, MAX_WIDTH),
            num_layers=self._whole("block_count", 1, MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=self._rope_reader.context_len(rope),
            activation=Activation.SILU,
            norm=NormKind.RMS,
            norm_eps=self._entries.number(self._prefix + "attention.layer_norm_rms_epsilon", 0.0, 1.0),
            embedding_size=hidden_size,
            dtype=self._dtype(),
            rope=rope,
            has_qkv_bias=self._has("blk.0.attn_q.bias") or self._has("blk.0.attn_qkv.bias"),
            has_output_bias=self._has("blk.0.attn_output.bias"),
            has_mlp_bias=self._has("blk.0.ffn_down.bias"),
            head_norm=HeadNormKind.HEADS if self._architecture.has_qk_norm else HeadNormKind.NONE,
            ties_embeddings=not self._has(HEAD),
            experts=experts,
            eos_token_ids=self._end_tokens(vocab_size),
        )

    def _head_dim(self, hidden_size: int, num_heads: int) -> int:
        default = hidden_size // num_heads
        if hidden_size % num_heads and not self._entries.has(self._prefix + "attention.key_length"):
            raise self._error("attention.head_count", "must divide the width of the embedding")
        head_dim = self._whole("attention.key_length", 1, MAX_WIDTH, default)
        if self._whole("attention.value_length", 1, MAX_WIDTH, head_dim) != head_dim:
            raise self._error("attention.value_length", "differs from key_length, which is not supported")
        return head_dim

    def _vocab_size(self, hidden_size: int) -> int:
        embedding = self._file.tensors.get(EMBEDDING)
        if embedding is None:
            raise ModelError(f"{self._file.path} holds no tensor {EMBEDDING}.")
        if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size or embedding.shape[0] > MAX_VOCABULARY:
            shape = list(embedding.shape)
            raise ModelError(
                f"{self._file.path}: tensor {EMBEDDING} has shape {shape}, expected rows of {hidden_size}."
            )
        tokens = self._file.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
            raise ModelError(
                f"{self._file.path}: the tokenizer has {len(tokens)} tokens, the embedding {embedding.shape[0]} rows."
            )
        return embedding.shape[0]

    def _rotary_dim(self, head_dim: int) -> int:
        rotary_dim = self._whole("rope.dimension_count", 1, head_dim, head_dim)
        is_whole = rotary_dim == head_dim or self._architecture.rotates_parts
        if rotary_dim % 2 or not is_whole:
            raise self._error("rope.dimension_count", f"must be an even number, of this architecture {head_dim}")
        return rotary_dim

    def _experts(self) -> ExpertConfig | None:
        num_experts = self._whole("expert_count", 0, MAX_EXPERTS, 0)
        if not num_experts:
            return None
        if self._architecture.expert_family is None:
            raise UnsupportedModel(f"{self._file.path}: experts ({self._prefix}expert_count) are not supported.")
        if self._has("blk.0.ffn_up.0.weight"):
            raise UnsupportedModel(
                f"{self._file.path} has a tensor for each expert, as files of before April 2024 have; a newer one of "
                "the same model has one for all."
            )
        if self._entries.number(self._prefix + "expert_weights_scale", 0.0, 1e6, 1.0) not in (0.0, 1.0):
            raise UnsupportedModel(f"{self._file.path}: {self._prefix}expert_weights_scale is not supported.")
        width = self._whole("feed_forward_length", 1, MAX_WIDTH)
        return ExpertConfig(
            num_experts=num_experts,
            num_chosen=self._whole("expert_used_count", 1, num_experts),
            intermediate_size=self._whole("expert_feed_forward_length", 1, MAX_WIDTH, width),
            normalises=True,
        )

    def _family(self, experts: ExpertConfig | None) -> str:
        if experts is None:
            return self._architecture.family
        assert self._architecture.expert_family is not None, "refused before"
        return self._architecture.expert_family

    def _dtype(self) -> str:
        projection = self._file.tensors.get("blk.0.attn_output.weight")
        return FLOAT_TYPES.get(projection.type.name if projection else "", "bfloat16")

    def _end_tokens(self, vocab_size: int) -> tuple[int, ...]:
        end_tokens: dict[int, None] = {}
        for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
            end_tokens |= dict.fromkeys(self._entries.token_ids(f"tokenizer.ggml.{name}", vocab_size))
        tokens = self._file.metadata.get("tokenizer.ggml.tokens")
        kinds = self._file.metadata.get("tokenizer.ggml.token_type")
        if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(kinds) == len(tokens):
            control = np.flatnonzero(kinds == _CONTROL).tolist()
            end_tokens |= dict.fromkeys(token_id for token_id in control if tokens[token_id] in _END_TOKENS)
        return tuple(end_tokens)

    def _has(self, name: str) -> bool:
        return name in self._file.tensors

    def _whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        name, entries = self._prefix + name, self._entries
        of_layers = self._file.metadata.get(name)
        if isinstance(of_layers, np.ndarray):
            if len(set(of_layers.tolist())) != 1:
                raise UnsupportedModel(f"{self._file.path}: {name} differs by layer, which is not supported.")
            entries = JsonFields({name: of_layers[0].item()}, entries.where)
        return entries.integer(name, low, high, default)

    def _error(self, name: str, problem: str) -> ModelError:
        return self._entries.error(self._prefix + name, problem)
