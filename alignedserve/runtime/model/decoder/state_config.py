"""Layers that keep what is before a token in a state of fixed size, not in keys and values; without torch."""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from alignedserve.core.block_layout import DTYPE_BYTES, STATE_HEADER_BYTES

HEADER_BYTES = STATE_HEADER_BYTES
STATE_ALIGNMENT = HEADER_BYTES  # bytes, of each part of a state


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a layer's state."""

    shape: tuple[int, ...]
    is_exact: bool  # in float32, whatever the dtype of the cache

    def dtype(self, cache_dtype: str) -> str:
        """Return its dtype: beside a cache that is rounded to 8 bits, which a state never is, float32."""
        return cache_dtype if cache_dtype in DTYPE_BYTES and not self.is_exact else "float32"

    def num_bytes(self, cache_dtype: str) -> int:
        size = math.prod(self.shape) * DTYPE_BYTES[self.dtype(cache_dtype)]
        return -(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT


@runtime_checkable
class StateConfig(Protocol):
    """A kind of layer with a state."""

    @property
    def title(self) -> str:
        """What it is, in words."""

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Elements that the modules of the layer's first product make of a token."""

    @property
    def out_width(self) -> int:
        """Elements of a token that its last product takes."""

    @property
    def has_product_bias(self) -> bool:
        """Whether both products have biases."""

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """The tensors of its state."""

    def parameters(self, hidden_size: int) -> int:
        """Return the weights of one layer, both products included."""


def state_bytes(config: StateConfig, cache_dtype: str) -> int:
    return sum(part.num_bytes(cache_dtype) for part in config.parts)


def layers_in_block(config: StateConfig, cache_dtype: str, block_bytes: int) -> int:
    """Return how many layers' states lie in a block that has nothing else, behind a header; 0: none fits."""
    return max(block_bytes - HEADER_BYTES, 0) // state_bytes(config, cache_dtype)


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """LFM2's short convolution, channel by channel, between two gates. The state has the inputs of the last tokens."""

    width: int
    kernel_size: int
    has_bias: bool = False

    @property
    def title(self) -> str:
        return "short convolutions"

    @property
    def has_product_bias(self) -> bool:
        return self.has_bias

    @property
    def in_widths(self) -> tuple[int, ...]:
        return (3 * self.width,)

    @property
    def out_width(self) -> int:
        return self.width

    @property
    def parts(self) -> tuple[StatePart, ...]:
        return (StatePart((self.kernel_size - 1, self.width), is_exact=False),)

    def parameters(self, hidden_size: int) -> int:
        biases = (4 * self.width + hidden_size) * self.has_bias
        return hidden_size * 4 * self.width + self.kernel_size * self.width + biases


@dataclass(frozen=True, slots=True)
class SpaceConfig:
    """Mamba-2's mixer. The state has the convolution's inputs of the last tokens, and a matrix a head, which fades."""

    num_heads: int
    head_dim: int
    num_groups: int  # of heads, which share inputs and outputs of states
    state_size: int
    kernel_size: int
    has_conv_bias: bool = True
    has_product_bias: bool = False
    has_norm: bool = True  # of each group's results
    gates_first: bool = True  # before that norm
    dt_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def title(self) -> str:
        return "Mamba-2 layers"

    @property
    def convolved(self) -> int:
        return self.out_width + 2 * self.num_groups * self.state_size

    @property
    def in_widths(self) -> tuple[int, ...]:
        return (self.out_width + self.convolved + self.num_heads,)

    @property
    def out_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def parts(self) -> tuple[StatePart, ...]:
        matrices = StatePart((self.num_heads, self.state_size, self.head_dim), is_exact=True)
        return StatePart((self.kernel_size - 1, self.convolved), is_exact=False), matrices

    def parameters(self, hidden_size: int) -> int:
        products = hidden_size * (sum(self.in_widths) + self.out_width)
        biases = (sum(self.in_widths) + hidden_size) * self.has_product_bias + self.convolved * self.has_conv_bias
        return (
            products + biases + self.kernel_size * self.convolved + 3 * self.num_heads + self.out_width * self.has_norm
        )


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The gated delta rule: heads remember a value for each key, and replace it. The state is as of SpaceConfig."""

    num_key_heads: int
    key_dim: int
    num_heads: int  # of values; a multiple
    value_dim: int
    kernel_size: int
    has_mixed_rows: bool  # rows of the products lie key head by key head

    @property
    def title(self) -> str:
        return "the gated delta rule"

    @property
    def has_product_bias(self) -> bool:
        return False

    @property
    def convolved(self) -> int:
        """Return the channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.out_width

    @property
    def in_widths(self) -> tuple[int, ...]:
        if self.has_mixed_rows:
            return self.convolved + self.out_width, 2 * self.num_heads
        return self.convolved, self.out_width, self.num_heads, self.num_heads

    @property
    def out_width(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def parts(self) -> tuple[StatePart, ...]:
        matrices = StatePart((self.num_heads, self.key_dim, self.value_dim), is_exact=True)
        return StatePart((self.kernel_size - 1, self.convolved), is_exact=False), matrices

    def parameters(self, hidden_size: int) -> int:
        products = hidden_size * (sum(self.in_widths) + self.out_width)
        return products + self.kernel_size * self.convolved + 2 * self.num_heads + self.value_dim
