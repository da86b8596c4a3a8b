"""Makes a ModelConfig of a GGUF file's metadata and of the tensors that it has."""

import math
from dataclasses import dataclass, replace

import numpy as np

from alignedserve.core.errors import ModelError, UnsupportedModel
from alignedserve.runtime.model.gguf.file import GgufFile
from alignedserve.runtime.model.gguf.tensor_types import FLOAT_TYPES
from alignedserve.runtime.model.hf_fields import MAX_HEADS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH
from alignedserve.runtime.model.json_fields import JsonFields
from alignedserve.runtime.model.model_config import Activation, Family, ModelConfig, NormKind, RopeConfig, RopeScaling
from alignedserve.runtime.model.rope_fields import MAX_CONTEXT
from kernels.block_values import unpack_rows

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
_FREQUENCY_FACTORS = "rope_freqs.weight"
# Control tokens that end an answer, beside those that the metadata name.
_END_TOKENS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"})
_CONTROL = 3  # among tokenizer.ggml.token_type


@dataclass(frozen=True, slots=True)
class _Architecture:
    """A value of general.architecture."""

    family: Family
    has_qk_norm: bool = False


_ARCHITECTURES = {
    "llama": _Architecture(Family.LLAMA),
    "qwen2": _Architecture(Family.QWEN2),
    "qwen3": _Architecture(Family.QWEN3, has_qk_norm=True),
    "gemma3": _Architecture(Family.GEMMA3_TEXT, has_qk_norm=True),
}
# llama.cpp knows these of Gemma 3 by itself.
_GEMMA3_GLOBAL_EVERY = 6  # layers
_GEMMA3_WINDOWED_THETA = 10000.0
_GEMMA3_27B_LAYERS = 62  # the one size whose scores are not scaled by the width of a head


def gguf_config(file: GgufFile) -> ModelConfig:
    """Return the config of the model in the file.

    Raises UnsupportedModel naming the architecture or option that the engine does not have, ModelError naming the
    entry that is wrong.
    """
    entries = JsonFields(file.metadata, str(file.path))
    name = entries.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedModel(f"{file.path}: architecture {name!r} is not one of {', '.join(_ARCHITECTURES)}.")
    config = _Parser(file, entries, name).config()
    return config if config.family is not Family.GEMMA3_TEXT else _gemma3(config, entries)


def _gemma3(config: ModelConfig, entries: JsonFields) -> ModelConfig:
    """Add what only Gemma 3 has."""
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


class _Parser:
    def __init__(self, file: GgufFile, entries: JsonFields, architecture: str) -> None:
        self._file = file
        self._entries = entries
        self._prefix = architecture + "."
        self._architecture = _ARCHITECTURES[architecture]

    def config(self) -> ModelConfig:
        if self._whole("expert_count", 0, MAX_HEADS, 0):
            raise UnsupportedModel(f"{self._file.path}: experts ({self._prefix}expert_count) are not supported.")
        hidden_size = self._whole("embedding_length", 1, MAX_WIDTH)
        num_heads = self._whole("attention.head_count", 1, MAX_HEADS)
        num_kv_heads = self._whole("attention.head_count_kv", 1, num_heads, num_heads)
        if num_heads % num_kv_heads:
            raise self._error("attention.head_count_kv", "must divide the number of heads")
        head_dim = self._head_dim(hidden_size, num_heads)
        vocab_size = self._vocab_size(hidden_size)
        return ModelConfig(
            family=self._architecture.family,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=self._whole("feed_forward_length", 1, MAX_WIDTH),
            num_layers=self._whole("block_count", 1, MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=self._whole("context_length", 1, MAX_CONTEXT),
            activation=Activation.SILU,
            norm=NormKind.RMS,
            norm_eps=self._entries.number(self._prefix + "attention.layer_norm_rms_epsilon", 0.0, 1.0),
            embedding_size=hidden_size,
            dtype=self._dtype(),
            rope=self._rope(head_dim),
            has_qkv_bias=self._has("blk.0.attn_q.bias"),
            has_output_bias=self._has("blk.0.attn_output.bias"),
            has_mlp_bias=self._has("blk.0.ffn_down.bias"),
            has_qk_norm=self._architecture.has_qk_norm,
            ties_embeddings=not self._has(HEAD),
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
        """Return the rows of the embedding; a file may have fewer tokens than rows, never more."""
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

    def _rope(self, head_dim: int) -> RopeConfig:
        if head_dim % 2 or self._whole("rope.dimension_count", 1, MAX_WIDTH, head_dim) != head_dim:
            raise self._error("rope.dimension_count", "must be the width of a head, an even number")
        theta = self._entries.number(self._prefix + "rope.freq_base", 1.0, 1e12, 10000.0)
        rope = RopeConfig(theta=theta, rotary_dim=head_dim, frequency_factors=self._frequency_factors(head_dim))
        kind = self._entries.text(self._prefix + "rope.scaling.type", "none")
        factor = self._entries.number(self._prefix + "rope.scaling.factor", 0.0, 1e6, 0.0)
        # Files of old converters have the factor alone.
        factor = self._entries.number(self._prefix + "rope.scale_linear", 0.0, 1e6, factor)
        if kind not in ("none", "linear"):
            raise UnsupportedModel(f"{self._file.path}: RoPE scaling {kind!r} is not supported (only linear is).")
        if kind == "none" and not self._entries.has(self._prefix + "rope.scale_linear"):
            return rope
        if factor in (0.0, 1.0):
            return rope
        return replace(rope, scaling=RopeScaling.LINEAR, factor=factor)

    def _frequency_factors(self, head_dim: int) -> tuple[float, ...]:
        """Return the divisors of the rotary frequencies: Llama 3's scaling, as files hold it."""
        tensor = self._file.tensors.get(_FREQUENCY_FACTORS)
        if tensor is None:
            return ()
        if tensor.shape != (head_dim // 2,) or tensor.type.name != "F32":
            raise ModelError(f"{self._file.path}: tensor {_FREQUENCY_FACTORS} is not F32 of {head_dim // 2} values.")
        factors = unpack_rows(self._file.raw_rows(tensor), "F32")[0]
        if not bool(np.isfinite(factors).all()) or float(factors.min()) <= 0.0:
            raise ModelError(f"{self._file.path}: tensor {_FREQUENCY_FACTORS} holds numbers that are not positive.")
        return tuple(float(factor) for factor in factors)

    def _dtype(self) -> str:
        """Return the dtype that holds the values of most tensors: that of the files where they are not in blocks."""
        projection = self._file.tensors.get("blk.0.attn_q.weight")
        return FLOAT_TYPES.get(projection.type.name if projection else "", "bfloat16")

    def _end_tokens(self, vocab_size: int) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
            found |= dict.fromkeys(self._entries.token_ids(f"tokenizer.ggml.{name}", vocab_size))
        tokens = self._file.metadata.get("tokenizer.ggml.tokens")
        kinds = self._file.metadata.get("tokenizer.ggml.token_type")
        if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(kinds) == len(tokens):
            control = np.flatnonzero(kinds == _CONTROL).tolist()
            found |= dict.fromkeys(token_id for token_id in control if tokens[token_id] in _END_TOKENS)
        return tuple(found)

    def _has(self, name: str) -> bool:
        return name in self._file.tensors

    def _whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        return self._entries.integer(self._prefix + name, low, high, default)

    def _error(self, name: str, problem: str) -> ModelError:
        return self._entries.error(self._prefix + name, problem)
