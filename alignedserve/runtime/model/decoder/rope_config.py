"""The configuration of rotary position embeddings; without torch."""

import enum
from dataclasses import dataclass


class RopeScaling(enum.Enum):
    """The scaling of rotary frequencies beyond the trained context."""

    NONE = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONG = "longrope"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float = 10000.0
    rotary_dim: int = 0  # leading dimensions of each head that are rotated
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this and the next: LLAMA3 only
    high_freq_factor: float = 4.0
    original_context_len: int = 8192  # the context of training: all but LINEAR
    beta_fast: float = 32.0  # this and the two below: YARN only
    beta_slow: float = 1.0
    has_whole_bounds: bool = True  # the first and last interpolated pair are rounded outwards
    short_divisors: tuple[float, ...] = ()  # this and the next, one per rotated pair: LONG only
    long_divisors: tuple[float, ...] = ()  # for contexts beyond the original one
    is_long: bool = False  # the context that is served is beyond the original one
    angle_factor: float = 1.0  # multiplies cosines and sines
    axes: tuple[int, ...] = ()  # of each rotated pair: 0: by time, 1: by row, 2: by column; empty: all are one
    frequency_factors: tuple[float, ...] = ()  # divisors of the frequencies, one each, where a file has its own
    num_turned: int = 0  # pairs of each head, the first ones, the others stay as they are: PROPORTIONAL only
