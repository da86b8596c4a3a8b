"""The frequencies by which each pair of a head's elements turns, in every scaling that families have."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from alignedserve.runtime.model.decoder.decoder_parts import RopeConfig, RopeScaling


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.frequency_factors:
        frequencies = frequencies / torch.tensor(rope.frequency_factors)
    return _SCALINGS[rope.scaling](frequencies, rope)


def _plain(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    return frequencies


def _linear(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    return frequencies / rope.factor


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    wavelengths = 2.0 * math.pi / frequencies
    turns = rope.original_context_len / wavelengths
    share_kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _mixed(frequencies, share_kept.clamp(0.0, 1.0), rope.factor)


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Keep pairs that turn often within the original context, and stretch pairs that turn seldom (YaRN, section 3.2).

    Example: theta 10 000, 64 rotated dimensions, context 4 096, beta 32 and 1: pair 10.4 turns 32 times and pair 22.5
    once, so pairs up to 10 are kept, pairs from 23 on stretched, and those between mixed.
    """
    first, last = _pair_of_turns(rope, rope.beta_fast), _pair_of_turns(rope, rope.beta_slow)
    if rope.has_whole_bounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = last - first if last != first else 0.001
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    return _mixed(frequencies, 1.0 - ((pairs - first) / width).clamp(0.0, 1.0), rope.factor)


def _pair_of_turns(rope: RopeConfig, turns: float) -> float:
    positions_per_radian = rope.original_context_len / (turns * 2.0 * math.pi)
    return rope.rotary_dim * math.log(positions_per_radian) / (2.0 * math.log(rope.theta))


def _long(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    return frequencies / torch.tensor(rope.long_divisors if rope.is_long else rope.short_divisors)


def _proportional(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    turned = frequencies / rope.factor
    turned[rope.num_turned :] = 0.0
    return turned


def _mixed(frequencies: Tensor, share_kept: Tensor, factor: float) -> Tensor:
    return share_kept * frequencies + (1.0 - share_kept) * frequencies / factor


_SCALINGS: dict[RopeScaling, Callable[[Tensor, RopeConfig], Tensor]] = {
    RopeScaling.NONE: _plain,
    RopeScaling.LINEAR: _linear,
    RopeScaling.LLAMA3: _llama3,
    RopeScaling.YARN: _yarn,
    RopeScaling.LONG: _long,
    RopeScaling.PROPORTIONAL: _proportional,
}
