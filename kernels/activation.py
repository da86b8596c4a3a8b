"""Nonlinearities of the feed-forward part. Each may overwrite its argument."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, element by element."""
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu_,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": gelu_tanh,
}


def gated(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """x [rows, 2 * width], gates first -> activation(gate) * up [rows, width]."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate).mul_(up)
