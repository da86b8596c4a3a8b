"""activation(gate) * up of the feed-forward part on a GPU, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import CLAMP_LIMIT, CLAMP_STEEPNESS
from kernels.float8_linear import Float8Inputs, attach
from kernels.gpu.float8_inputs import MOST_ELEMENTS, empty_rows, store_rounded
from kernels.gpu.launching import parts_of, power_of_two, row_warps

_COLUMNS = 1024  # of one program

NAMES = ("relu", "silu", "gelu", "gelu_tanh", "clamped_silu")
_LIMIT, _STEEPNESS = tl.constexpr(CLAMP_LIMIT), tl.constexpr(CLAMP_STEEPNESS)


class Gates:
    """The gated product with one activation, a name in NAMES."""

    __slots__ = ("_activation", "_rounds", "_unread")

    def __init__(self, activation: str, *, rounds: bool = False, unread: Tensor | None = None) -> None:
        """`rounds`: for a product in FP8, to which results are attached rounded where a program holds a row; `unread`:
        see kernels.activation.Norm."""
        assert activation in NAMES, f"no kernel for {activation}"
        self._activation, self._rounds, self._unread = activation, rounds, unread

    def rounding(self, unread: Tensor | None = None) -> "Gates":
        return Gates(self._activation, rounds=True, unread=unread)

    def __call__(self, x: Tensor) -> Tensor:
        """Gate x [rows, 2 * width], gates first, rows possibly strided -> [rows, width], dtype of x."""
        num_rows, width = x.shape[0], x.shape[1] // 2
        if self._rounds and width <= MOST_ELEMENTS:
            return self._rounded(x, width)
        out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
        if num_rows:
            grid = (num_rows, parts_of(width, _COLUMNS))
            _gate[grid](
                x,
                out,
                x,
                x,
                x.stride(0),
                width,
                ACTIVATION=self._activation,
                ROUNDS=False,
                IS_READ=True,
                COLUMNS=_COLUMNS,
            )
        return out

    def _rounded(self, x: Tensor, width: int) -> Tensor:
        num_rows, unread = len(x), self._unread
        if unread is None:
            out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
        else:
            out = unread.expand(num_rows, width)
        inputs = Float8Inputs(*empty_rows(num_rows, width, x.device))
        padded_width = power_of_two(width)
        if num_rows:
            _gate[(num_rows, 1)](
                x,
                out if unread is None else x,  # of whose dtype results would be
                inputs.values.view(torch.uint8),
                inputs.scales,
                x.stride(0),
                width,
                ACTIVATION=self._activation,
                ROUNDS=True,
                IS_READ=unread is None,
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
def silu(x):
    return x * _sigmoid(x)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)  # not a number stays so
    elif ACTIVATION == "silu":
        y = silu(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "clamped_silu":
        x = tl.where(x > _LIMIT, _LIMIT, x)
        y = x * _sigmoid(x * _STEEPNESS)
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
    IS_READ: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = columns < width
    gate = tl.load(x + row * stride + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + width + columns, mask=is_there, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped_silu":
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1.0
    # The activation is rounded before it is multiplied, as in a separate operation.
    activated = _activated(gate, ACTIVATION).to(out.dtype.element_ty).to(tl.float32)
    result = (activated * up).to(out.dtype.element_ty)
    if IS_READ:
        tl.store(out + row * width + columns, result, mask=is_there)
    if ROUNDS:
        store_rounded(result.to(tl.float32), is_there, values, scales, row, width, columns)
