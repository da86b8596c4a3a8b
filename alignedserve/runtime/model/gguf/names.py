"""The names of tensors in a GGUF file, and the check that the file has no others: one unread would change answers."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from alignedserve.core.errors import ModelError, UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.gguf.file import GgufFile, GgufTensor
from alignedserve.runtime.model.decoder.decoder_parts import HeadNormKind, RopeConfig, RopeScaling
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.names import NAMES
from alignedserve.runtime.model.hf_fields import MAX_CONTEXT, yarn_angle_factor
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
            return self._long(rope)
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

    def _long(self, rope: RopeConfig) -> RopeConfig:
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
