"""Nonlinearities of the feed-forward part. Each may overwrite its argument."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.rows import GateRows, native_level
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
