"""Normalisation of rows on a GPU, a residual added on the way: one program per row, which is read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.float8_linear import Float8Inputs, attach
from kernels.gpu.float8_inputs import MOST_ELEMENTS, empty_rows, store_rounded
from kernels.gpu.launching import power_of_two, row_warps


class RowNorm:
    """Layer normalisation over rows, or the root mean square form of it. Sums are float32."""

    __slots__ = ("_bias", "_eps", "_is_rms", "_rounds", "_unread", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_rms: bool) -> None:
        """`weight` [width], `bias` [width] or None: kept, contiguous, on the GPU, of the rows' dtype or float32."""
        self._rounds = False
        self._unread: Tensor | None = None
        self._weight = weight.contiguous()
        self._bias = None if bias is None else bias.contiguous()
        self._eps = eps
        self._is_rms = is_rms

    def round_results(self, unread: Tensor | None = None) -> None:
        """Attach rounded rows to results, for a product in FP8; `unread`: see kernels.activation.Norm."""
        self._rounds, self._unread = True, unread

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalise x [rows, width] -> normalised [rows, width], dtype of x. With `residual` of the same shape,
        residual += x first, in place, and the result is the normalised residual. Rows may be strided."""
        num_rows, width = x.shape
        padded_width = power_of_two(width)
        rounds = self._rounds and padded_width <= MOST_ELEMENTS
        unread = self._unread if rounds else None
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if unread is None else unread.expand(x.shape)
        if not num_rows:
            return out
        inputs = Float8Inputs(*empty_rows(num_rows, width, x.device)) if rounds else None
        _normalise[(num_rows,)](
            x,
            x if residual is None else residual,
            self._weight,
            self._weight if self._bias is None else self._bias,
            out if unread is None else x,  # of whose dtype results would be
            out if inputs is None else inputs.values.view(torch.uint8),
            out if inputs is None else inputs.scales,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            width,
            self._eps,
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=self._bias is not None,
            IS_RMS=self._is_rms,
            ROUNDS=rounds,
            IS_READ=unread is None,
            PADDED_WIDTH=padded_width,
            num_warps=row_warps(padded_width),
        )
        return out if inputs is None else attach(out, inputs)


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch each form once on a tiny input. Raises the errors of the launch."""
    weight = torch.ones(16, dtype=dtype, device=device)
    for is_rms in (True, False):
        norm = RowNorm(weight, None if is_rms else weight, 1e-5, is_rms=is_rms)
        norm(weight[None], weight[None].clone())


@triton.jit
def _normalise(
    x,
    residual,
    weight,
    bias,
    out,
    values,
    scales,
    x_stride,
    residual_stride,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_RMS: tl.constexpr,
    ROUNDS: tl.constexpr,
    IS_READ: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_WIDTH)
    is_there = columns < width
    read = tl.load(x + row * x_stride + columns, mask=is_there, other=0.0)
    if HAS_RESIDUAL:
        there = residual + row * residual_stride + columns
        # Rounded as the residual is stored, so that the norm is of the values that later layers read.
        read = (read.to(tl.float32) + tl.load(there, mask=is_there, other=0.0).to(tl.float32)).to(out.dtype.element_ty)
        tl.store(there, read, mask=is_there)
    read = read.to(tl.float32)
    if not IS_RMS:
        read = tl.where(is_there, read - tl.sum(read, axis=0) / width, 0.0)
    read = read / tl.sqrt(tl.sum(read * read, axis=0) / width + eps)
    if IS_RMS:
        read = read.to(out.dtype.element_ty).to(tl.float32)
    read = read * tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
    if HAS_BIAS:
        read += tl.load(bias + columns, mask=is_there, other=0.0).to(tl.float32)
    result = read.to(out.dtype.element_ty)
    if IS_READ:
        tl.store(out + row * width + columns, result, mask=is_there)
    if ROUNDS:
        store_rounded(result.to(tl.float32), is_there, values, scales, row, width, columns)
