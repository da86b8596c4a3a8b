"""Normalisation of layer inputs."""

import torch
from torch import Tensor
from torch.nn import functional


class LayerNorm:
    """x [..., width] -> (x - mean) / deviation * weight + bias, over the last dimension, dtype of x."""

    __slots__ = ("_bias", "_eps", "_shape", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise; x stays as it is."""
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class RmsNorm:
    """x [..., width] -> x / root mean square * weight, over the last dimension, dtype of x, statistics in float32."""

    __slots__ = ("_eps", "_shape", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise; x stays as it is."""
        if x.dtype == torch.float32:
            return functional.rms_norm(x, self._shape, self._weight, self._eps)
        scaled = functional.rms_norm(x.float(), self._shape, None, self._eps)
        return scaled.to(x.dtype) * self._weight
