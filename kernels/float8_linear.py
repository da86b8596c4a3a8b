"""Matrix products with weights of FP8 (e4m3), by `torch._scaled_mm`: on GPUs of compute capability 8.9 and later.

Inputs are rounded to FP8 with one scale per row, once for all products that read them, so that what shares the batch
never changes a row's result; weights have one scale per output. A norm or a gate that computes the rows on a GPU rounds
them in the same launch and attaches them to its result: to read an element from the GPU's memory again costs more.

Worked example: an input row [0.5, -448 * 0.5] has scale 0.5 and becomes [1, -448]; a weight row [2, 1] of scale 0.25
gives (1 * 2 - 448 * 1) * 0.5 * 0.25 = -55.75."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.addends import Addends
from kernels.gpu_dispatch import fused_kernels
from kernels.grouped_linear import ProductEnd

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


_FIRST_CAPABILITY = (8, 9)


def has_float8_products(device: torch.device | str) -> bool:
    """Return whether this device is a GPU that multiplies FP8."""
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


class Float8Linear:
    """x [rows, in_width] -> activation(x @ weight.T + bias) [rows, out_width], of dtype `dtype`. With gates:
    activation(gate) * up, of a weight whose first half makes the gates."""

    __slots__ = ("_dtype", "_end", "_scales", "_weight", "in_width", "out_width")

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        activation: str | None = None,
        is_gated: bool = False,
    ) -> None:
        """`weight` float8_e4m3fn [columns, in_width], both multiples of 16, and `scales` float32 [columns]: kept;
        `bias` [columns]. `activation`: a name in ACTIVATIONS, needed with gates."""
        assert weight.dtype == torch.float8_e4m3fn, f"not FP8: {weight.dtype}"
        columns, self.in_width = weight.shape
        assert columns % 16 == 0 == self.in_width % 16, f"not multiples of 16: {tuple(weight.shape)}"
        self._end = ProductEnd(weight, bias, dtype=dtype, activation=activation, is_gated=is_gated)
        self.out_width = self._end.out_width
        self._weight, self._scales, self._dtype = weight.contiguous().T, scales.float()[None, :].contiguous(), dtype

    def round_results(self, unread: Tensor | None = None) -> None:
        """Round gated results for a product in FP8 as they are computed, where a kernel does so. `unread`: see Norm."""
        self._end.round_results(unread)

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Multiply x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        values, scales = float8_inputs(x)
        product: Tensor = torch._scaled_mm(
            values, self._weight, scale_a=scales, scale_b=self._scales, out_dtype=torch.bfloat16
        )
        return self._end(product.to(self._dtype), addends)
