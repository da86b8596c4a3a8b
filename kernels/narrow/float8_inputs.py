"""Inputs of products in FP8 (e4m3): rows rounded with a scale each, once for all products that read them.

A norm or a gate that computes the rows on a GPU rounds them in the same launch and attaches them to its result, as the
element that is read from the GPU's memory again costs more than the rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.gpu_dispatch import fused_kernels

LARGEST = 448.0
_SMALLEST_SCALE = 1e-12  # of a row of zeros
_ATTACHED = "float8_inputs"  # of a tensor that nothing changes afterwards


class Float8Inputs(NamedTuple):
    """Rounded rows: `values` times their scale are about the rows."""

    values: Tensor  # float8_e4m3fn [rows, in_width]
    scales: Tensor  # float32 [rows, 1]


def attach(x: Tensor, inputs: Float8Inputs) -> Tensor:
    """Keep what rows x [rows, in_width], which nothing changes any more, are rounded to; return x."""
    setattr(x, _ATTACHED, inputs)
    return x


def float8_inputs(x: Tensor) -> Float8Inputs:
    """Return x [rows, in_width] rounded: as attached to it, or now."""
    attached: Float8Inputs | None = getattr(x, _ATTACHED, None)
    if attached is not None:
        return attached
    kernels = fused_kernels(_ATTACHED, x.device, x.dtype)
    return rounded_inputs(x) if kernels is None else Float8Inputs(*kernels.round_rows(x))


def rounded_inputs(x: Tensor) -> Float8Inputs:
    """Compute the same with PyTorch's operations."""
    scales = x.abs().amax(dim=1, keepdim=True).float().div_(LARGEST).clamp_(min=_SMALLEST_SCALE)
    return Float8Inputs((x / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales)
