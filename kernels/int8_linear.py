"""Matrix products with weights of 8 bits, through oneDNN (VNNI where the processor has it).

Weights are rounded once, symmetrically, with one scale per output; inputs on every call, symmetrically, with one scale
per row, so that what shares the batch never changes a row's result. Sums are exact (32-bit integers).

Worked example: weight row [0.5, -1.27] has scale 1.27 / 127 = 0.01 and is kept as [50, -127]; input row [2.54, 1.27]
has scale 0.02 and becomes [127, 64]; the product is (127 * 50 - 64 * 127) * 0.02 * 0.01 = -0.356 for -0.343.
"""

import torch
from torch import Tensor

from kernels.activation import ACTIVATIONS

_LARGEST = 127.0
_ZERO_POINT = 128
_SMALLEST_SCALE = 1e-12  # of a row of zeros


class Int8Linear:
    """x [rows, in_width] -> activation(x @ weight.T + bias) [rows, out_width], dtype of the weight it was made from."""

    __slots__ = ("_activation", "_bias", "_dtype", "_packed", "_scales", "_zeros", "in_width", "out_width")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None) -> None:
        """`weight` [out_width, in_width] float, on the CPU, of finite numbers; `bias` [out_width]. Keeps neither's
        memory but the bias's. See `int8_obstacle` for what does not pack."""
        self.out_width, self.in_width = weight.shape
        self._dtype = weight.dtype
        self._bias = None if bias is None else bias.float()
        self._activation = None if activation is None else ACTIVATIONS[activation]
        scales = weight.abs().amax(dim=1).float().div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
        rounded = torch.div(weight, scales[:, None]).round_().to(torch.int8)
        self._packed: Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._scales = scales
        self._zeros = torch.zeros(self.out_width, dtype=torch.int64)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        row_scales = x.abs().amax(dim=1, keepdim=True).float().div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
        # oneDNN's fast path takes unsigned inputs; for signed ones it falls back to a loop hundreds of times as slow.
        rounded = torch.div(x, row_scales).round_().add_(_ZERO_POINT).to(torch.uint8)
        weight = (self._packed, self._scales, self._zeros, None)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, _ZERO_POINT, *weight, 1.0, 0, torch.float32, "none", [], ""
        )
        product.mul_(row_scales)
        if self._bias is not None:
            product.add_(self._bias)
        product = product.to(self._dtype)
        return product if self._activation is None else self._activation(product)


def int8_obstacle(weight: Tensor) -> str | None:
    """Why this weight cannot be packed with 8 bits; None when it can."""
    if weight.device.type != "cpu":
        return f"8-bit products run on a CPU, the weight is on {weight.device}"
    if not torch._C._has_mkldnn or not hasattr(torch.ops.onednn, "qlinear_prepack"):
        return "this build of PyTorch has no oneDNN"
    if not bool(weight.isfinite().all()):
        return "it holds numbers that are not finite"
    return None
