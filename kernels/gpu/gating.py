"""activation(gate) * up of the feed-forward part on a GPU, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024  # of one program

NAMES = ("relu", "silu", "gelu", "gelu_tanh")


class Gates:
    """The gated product with one activation, a name in NAMES."""

    __slots__ = ("_activation",)

    def __init__(self, activation: str) -> None:
        assert activation in NAMES, f"no kernel for {activation}"
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """Gate x [rows, 2 * width], gates first, rows possibly strided -> [rows, width], dtype of x."""
        num_rows, width = x.shape[0], x.shape[1] // 2
        out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
        if num_rows:
            grid = (num_rows, triton.cdiv(width, _COLUMNS))
            _gate[grid](x, out, x.stride(0), width, ACTIVATION=self._activation, COLUMNS=_COLUMNS)
        return out


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch each form on 16 columns, as Triton compiles separately for sizes divisible by 16. Raises its errors."""
    for name in NAMES:
        Gates(name)(torch.ones((1, 32), dtype=dtype, device=device))


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
def _gate(x, out, stride, width, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = columns < width
    gate = tl.load(x + row * stride + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + width + columns, mask=is_there, other=0.0).to(tl.float32)
    # The activation is rounded before it is multiplied, as in a separate operation.
    activated = _activated(gate, ACTIVATION).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + columns, (activated * up).to(out.dtype.element_ty), mask=is_there)
