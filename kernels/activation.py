"""Nonlinearities of the feed-forward part. Each may overwrite its argument.

Normalisation of layer inputs, in one pass with the residual added where the native or the GPU kernels run."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.rows import GateRows, NormRows, native_level
from kernels.gpu_dispatch import fused_kernels

# Of gpt-oss.
CLAMP_LIMIT, CLAMP_STEEPNESS = 7.0, 1.702


def gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    return functional.relu_(x).square_()


def clamped_silu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return gate * torch.sigmoid(gate * CLAMP_STEEPNESS) * (up + 1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu_,
    "relu2": relu2,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": gelu_tanh,
}
# Of gates and ups together.
_OF_BOTH = {"clamped_silu": clamped_silu}


class Gated:
    """x [rows, 2 * width], gates first -> activation(gate) * up [rows, width]."""

    __slots__ = ("_activation", "_rows", "device", "dtype")

    def __init__(self, activation: str, dtype: torch.dtype, device: torch.device) -> None:
        """`activation`: a name in ACTIVATIONS, or clamped_silu."""
        self.dtype, self.device = dtype, device
        self._activation = activation
        self._rows = _gate_rows(activation, dtype, device)

    def round_results(self, unread: Tensor | None = None) -> None:
        """Round results for a product in FP8 in the launch that computes them, on a GPU. `unread`: see Norm."""
        if self._rows is not None and not isinstance(self._rows, GateRows):
            self._rows = self._rows.rounding(unread)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the activation. May overwrite x."""
        if self._rows is None:
            return gated(x, self._activation)
        results: Tensor = self._rows(x)
        return results


class Activated:
    """x [rows, width] -> activation(x)."""

    __slots__ = ("_activation", "device", "dtype")

    def __init__(self, activation: str, dtype: torch.dtype, device: torch.device) -> None:
        """`activation`: a name in ACTIVATIONS."""
        self.dtype, self.device = dtype, device
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it. May overwrite x."""
        return self._activation(x)


def gated(x: Tensor, activation: str) -> Tensor:
    """Compute the same in plain PyTorch."""
    gate, up = x.chunk(2, dim=-1)
    if activation in _OF_BOTH:
        return _OF_BOTH[activation](gate, up)
    return ACTIVATIONS[activation](gate).mul_(up)


def _gate_rows(activation: str, dtype: torch.dtype, device: torch.device) -> Any | None:
    fused = fused_kernels("gating", device, dtype)
    if fused is not None:
        return fused.Gates(activation)
    level = native_level(dtype, device) if activation in GateRows.ACTIVATIONS else None
    return None if level is None else GateRows(activation, dtype, level=level)


class Norm(Protocol):
    """Normalisation before, or after, the parts of a layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x [..., width] -> normalised over the last dimension, dtype of x; x stays as it is."""

    def after_adding_(self, residual: Tensor, x: Tensor) -> Tensor:
        """Add residual += x, both [rows, width], and return the normalised residual; x stays unchanged."""

    def round_results(self, unread: Tensor | None = None) -> None:
        """Round results, which a product in FP8 reads and nothing changes, as they are computed, on a GPU. `unread` [1,
        1], NaN of the rows' dtype: stands for results of which nothing reads more than what they are rounded to; None:
        they are written as well."""


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
