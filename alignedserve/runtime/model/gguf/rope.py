"""Reads the rotary position embedding of a GGUF file, in llama.cpp's spelling."""

from dataclasses import replace

import numpy as np

from alignedserve.core.errors import ModelError, UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.gguf.file import GgufFile
from alignedserve.runtime.model.decoder.rope_config import RopeConfig, RopeScaling
from alignedserve.runtime.model.rope_fields import MAX_CONTEXT, yarn_angle_factor
from kernels.weight_blocks.block_values import unpack_rows

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
        """Return the divisors of the rotary frequencies in a tensor; none where there is no such tensor.

        Llama 3's scaling is one tensor of them, LongRoPE's are two.
        """
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
