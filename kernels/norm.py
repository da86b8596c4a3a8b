"""Normalisation of layer inputs, in one pass with the residual added where the native or the GPU kernels run."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.rows import NormRows, native_level
from kernels.gpu_dispatch import fused_kernels


class Norm(Protocol):
    """Normalisation before, or after, the parts of a layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x [..., width] -> normalised over the last dimension, dtype of x; x stays as it is."""

    def after_adding_(self, residual: Tensor, x: Tensor) -> Tensor:
        """Add residual += x, both [rows, width], and return the normalised residual; x stays unchanged."""

    def round_results(self, unread: Tensor | None = None) -> None:
        """Round results, which a product in FP8 reads and nothing changes, as they are computed, on a GPU.

        `unread` [1, 1], NaN of the rows' dtype: stands for results of which nothing reads more than what they are
        rounded to; None: they are written as well.
        """


class NoNorm:
    """Leaves the residual stream as it is: of families that normalise behind the parts of a layer alone."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Return x itself."""
        return x

    def after_adding_(self, residual: Tensor, x: Tensor) -> Tensor:
        """Add residual += x, and return the residual itself."""
        return residual.add_(x)

    def round_results(self, unread: Tensor | None = None) -> None:
        """Do nothing: the product rounds what it reads."""


class LayerNorm:
    """(x - mean) / deviation * weight + bias; without a bias, not shifted."""

    __slots__ = ("_bias", "_eps", "_rows", "_shape", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps
        self._shape = tuple(weight.shape)
        self._rows = _row_norm(weight, bias, eps, is_rms=False)

    @property
    def native_rows(self) -> NormRows | None:
        """Return the native kernel, where it runs."""
        return self._rows if isinstance(self._rows, NormRows) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._rows is not None and x.ndim == 2:
            return self._rows(x)
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)

    def after_adding_(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._rows(x, residual) if self._rows is not None else self(residual.add_(x))

    def round_results(self, unread: Tensor | None = None) -> None:
        _round_results(self._rows, unread)


class RmsNorm:
    """x / root mean square * weight, statistics in float32."""

    __slots__ = ("_eps", "_rows", "_weight")

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of the rows, where the weight's is float32 and theirs is not."""
        self._weight = weight
        self._eps = eps
        self._rows = _row_norm(weight, None, eps, is_rms=True, dtype=dtype)

    @property
    def native_rows(self) -> NormRows | None:
        """Return the native kernel, where it runs."""
        return self._rows if isinstance(self._rows, NormRows) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._rows is not None and x.ndim == 2:
            return self._rows(x)
        return rms_norm(x, self._weight, self._eps)

    def after_adding_(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._rows(x, residual) if self._rows is not None else self(residual.add_(x))

    def round_results(self, unread: Tensor | None = None) -> None:
        _round_results(self._rows, unread)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in plain PyTorch, x of any shape [..., width]."""
    shape = tuple(weight.shape)
    if x.dtype == torch.float32:
        return functional.rms_norm(x, shape, weight, eps)
    if weight.dtype == torch.float32:
        return functional.rms_norm(x.float(), shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x.float(), shape, None, eps).to(x.dtype) * weight


def _round_results(rows: Any | None, unread: Tensor | None) -> None:
    if rows is not None and not isinstance(rows, NormRows):
        rows.round_results(unread)


def _row_norm(
    weight: Tensor, bias: Tensor | None, eps: float, *, is_rms: bool, dtype: torch.dtype | None = None
) -> Callable[..., Tensor] | None:
    dtype = dtype or weight.dtype
    fused = fused_kernels("row_norm", weight.device, dtype)
    if fused is not None:
        on_gpu: Callable[..., Tensor] = fused.RowNorm(weight, bias, eps, is_rms=is_rms)
        return on_gpu
    level = native_level(dtype, weight.device)
    return None if level is None else NormRows(weight, bias, eps, is_rms=is_rms, level=level, dtype=dtype)
