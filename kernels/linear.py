"""Matrix products with a fixed weight, packed once for the machine where that pays.

On a CPU, oneDNN's packed layout runs float32 1.1 to 3 times and bfloat16 1.05 to 2 times as fast as
`torch.nn.functional.linear` (most for few rows), and needs no more memory than the plain weight. A nonlinearity that
follows is applied while the product is in registers.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import ACTIVATIONS

# oneDNN chooses a layout for an expected number of rows; this one measured well from 1 to 2048 rows.
_PACKING_ROWS = 64


class _PostOp(NamedTuple):
    """A nonlinearity as oneDNN names it."""

    name: str
    algorithm: str


_POST_OPS = {
    None: _PostOp("none", ""),
    "relu": _PostOp("relu", ""),
    "silu": _PostOp("swish", ""),
    "gelu": _PostOp("gelu", "none"),
    "gelu_tanh": _PostOp("gelu", "tanh"),
}


class Projection(Protocol):
    """Whatever computes x [rows, in_width] -> [rows, out_width]: `Linear`, `Int8Linear`, or one that is measured."""

    in_width: int
    out_width: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in_width], rows >= 1, stays as it is -> [rows, out_width]."""


class Linear:
    """x [rows, in_width] -> activation(x @ weight.T + bias) [rows, out_width], dtype and device of the weight."""

    __slots__ = ("_activation", "_bias", "_packed", "_post_op", "_weight", "in_width", "out_width")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None, allow_packing: bool = True
    ) -> None:
        """`weight` [out_width, in_width]; `bias` [out_width]; `activation` a name in ACTIVATIONS.

        Keeps no reference to a weight that it packed.
        """
        self.out_width, self.in_width = weight.shape
        self._bias = bias
        self._activation = _function_of(activation)
        self._post_op = _POST_OPS[activation]
        self._packed = _pack(weight) if allow_packing else None
        self._weight = weight if self._packed is None else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        if self._packed is None:
            assert self._weight is not None, "a linear without weight"
            plain = functional.linear(x, self._weight, self._bias)
            return plain if self._activation is None else self._activation(plain)
        name, algorithm = self._post_op
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, name, [], algorithm)
        return product


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this dtype are packed on this device and processor."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack(weight: Tensor) -> Tensor | None:
    if not can_pack(weight.dtype, weight.device):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_ROWS)
    return packed


def _function_of(activation: str | None) -> Callable[[Tensor], Tensor] | None:
    return None if activation is None else ACTIVATIONS[activation]
