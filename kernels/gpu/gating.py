"""activation(gate) * up of the feed-forward part on a GPU, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.float8_inputs import MOST_ELEMENTS, empty_rows, store_rounded
from kernels.gpu.launching import row_warps
from kernels.narrow.float8_inputs import Float8Inputs, attach

_COLUMNS = 1024  # of one program

NAMES = ("relu", "silu", "gelu", "gelu_tanh")


class Gates:
    """The gated product with one activation, a name in NAMES."""

    __slots__ = ("_activation", "_rounds")

    def __init__(self, activation: str, *, rounds: bool = False) -> None:
        """`rounds`: for a product in FP8, to which results are attached rounded where a program holds a row."""
        assert activation in NAMES, f"no kernel for {activation}"
        self._activation, self._rounds = activation, rounds

    def rounding(self) -> "Gates":
        """Return the same, which rounds its results."""
        return Gates(self._activation, rounds=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Gate x [rows, 2 * width], gates first, rows possibly strided -> [rows, width], dtype of x."""
        num_rows, width = x.shape[0], x.shape[1] // 2
        out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
        if self._rounds and width <= MOST_ELEMENTS:
            return self._rounded(x, out)
        if num_rows:
            grid = (num_rows, triton.cdiv(width, _COLUMNS))
            _gate[grid](x, out, x, x, x.stride(0), width, ACTIVATION=self._activation, ROUNDS=False, COLUMNS=_COLUMNS)
        return out

    def _rounded(self, x: Tensor, out: Tensor) -> Tensor:
        num_rows, width = out.shape
        inputs = Float8Inputs(*empty_rows(num_rows, width, x.device))
        padded_width = triton.next_power_of_2(width)
        if num_rows:
            _gate[(num_rows, 1)](
                x,
                out,
                inputs.values.view(torch.uint8),
                inputs.scales,
                x.stride(0),
                width,
                ACTIVATION=self._activation,
                ROUNDS=True,
                COLUMNS=padded_width,
                num_warps=row_warps(padded_width),
            )
        return attach(out, inputs)


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch each form on 16 columns, as Triton compiles separately for sizes divisible by 16. Raises its errors."""
    for name in NAMES:
        for gates in (Gates(name), Gates(name, rounds=True)):
            gates(torch.ones((1, 32), dtype=dtype, device=device))


@triton.jit
def _sigmoid(x):
    # The form whose exponential cannot overflow.
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)  # not a number stays so
    elif ACTIVATION == "silu":
        y = x * _sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 1 + tanh(z) = 2 * sigmoid(2 * z), z = sqrt(2 / pi) * (x + 0.044715 * x ** 3)
        y = x * _sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    return y


@triton.jit
def _gate(
    x,
    out,
    values,
    scales,
    stride,
    width,
    ACTIVATION: tl.constexpr,
    ROUNDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = columns < width
    gate = tl.load(x + row * stride + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + width + columns, mask=is_there, other=0.0).to(tl.float32)
    # The activation is rounded before it is multiplied, as in a separate operation.
    activated = _activated(gate, ACTIVATION).to(out.dtype.element_ty).to(tl.float32)
    result = (activated * up).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, result, mask=is_there)
    if ROUNDS:
        store_rounded(result.to(tl.float32), is_there, values, scales, row, width, columns)
