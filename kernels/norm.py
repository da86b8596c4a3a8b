"""Normalisation of layer inputs, in one pass with the residual added where the native kernels run."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.rows import NormRows, native_level


class Norm(Protocol):
    """What stands before, or after, the parts of a layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., width] -> normalised over the last dimension, dtype of x; x stays as it is."""

    def after_adding_(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x, both [rows, width]; the normalised residual. x stays as it is."""


class LayerNorm:
    """(x - mean) / deviation * weight + bias."""

    __slots__ = ("_bias", "_eps", "_rows", "_shape", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps
        self._shape = tuple(weight.shape)
        level = native_level(weight.dtype, weight.device)
        self._rows = None if level is None else NormRows(weight, bias, eps, is_rms=False, level=level)

    def __call__(self, x: Tensor) -> Tensor:
        """See Norm."""
        if self._rows is not None and x.ndim == 2:
            return self._rows(x)
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)

    def after_adding_(self, residual: Tensor, x: Tensor) -> Tensor:
        """See Norm."""
        return self._rows(x, residual) if self._rows is not None else self(residual.add_(x))


class RmsNorm:
    """x / root mean square * weight, statistics in float32."""

    __slots__ = ("_eps", "_rows", "_shape", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._shape = tuple(weight.shape)
        level = native_level(weight.dtype, weight.device)
        self._rows = None if level is None else NormRows(weight, None, eps, is_rms=True, level=level)

    def __call__(self, x: Tensor) -> Tensor:
        """See Norm."""
        if self._rows is not None and x.ndim == 2:
            return self._rows(x)
        if x.dtype == torch.float32:
            return functional.rms_norm(x, self._shape, self._weight, self._eps)
        scaled = functional.rms_norm(x.float(), self._shape, None, self._eps)
        return scaled.to(x.dtype) * self._weight

    def after_adding_(self, residual: Tensor, x: Tensor) -> Tensor:
        """See Norm."""
        return self._rows(x, residual) if self._rows is not None else self(residual.add_(x))
