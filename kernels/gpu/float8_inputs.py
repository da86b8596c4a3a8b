"""Rows rounded to FP8 (e4m3) with a scale each, on a GPU: in one pass, or by the kernel that computes the row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.blocks import float8_bytes
from kernels.gpu.launching import power_of_two, row_warps

MOST_ELEMENTS = 16384  # of a row that a program holds at a time
_LARGEST = tl.constexpr(448.0)
_SMALLEST_SCALE = tl.constexpr(1e-12)  # of a row of zeros


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [rows, width], rows possibly strided -> float8_e4m3fn [rows, width], and scales float32 [rows, 1]. A
    row's scale is its largest magnitude / 448; that of a row which holds NaN is NaN."""
    values, scales = empty_rows(len(x), x.shape[1], x.device)
    if len(x):
        tile = min(power_of_two(x.shape[1]), MOST_ELEMENTS)
        _round_rows[(len(x),)](
            x,
            values.view(torch.uint8),
            scales,
            x.stride(0),
            x.shape[1],
            IS_WHOLE=x.shape[1] <= tile,
            TILE=tile,
            num_warps=row_warps(tile),
        )
    return values, scales


def empty_rows(num_rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty((num_rows, 1), dtype=torch.float32, device=device)


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    round_rows(torch.ones((1, 16), dtype=dtype, device=device))


@triton.jit
def row_scale(largest, is_number):
    """Return the scale of a row: `largest` of its magnitudes; whether all of it `is_number`."""
    scale = tl.maximum(tl.div_rn(largest, _LARGEST), _SMALLEST_SCALE)
    return tl.where(is_number, scale, float("nan"))


@triton.jit
def store_rounded(own, is_there, values, scales, row, width, columns):
    """Round a row, held whole as float32 `own`, and store its bytes and its scale."""
    is_wrong = ((own != own) & is_there).to(tl.int32)
    largest = tl.max(tl.where((own == own) & is_there, tl.abs(own), 0.0), axis=0)
    scale = row_scale(largest, tl.max(is_wrong, axis=0) == 0)
    tl.store(scales + row, scale)
    tl.store(values + row * width + columns, float8_bytes(tl.div_rn(own, scale)), mask=is_there)


@triton.jit
def _round_rows(x, values, scales, x_stride, width, IS_WHOLE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    own_row = x + row * x_stride
    if IS_WHOLE:
        loaded = tl.load(own_row + columns, mask=columns < width, other=0.0).to(tl.float32)
        store_rounded(loaded, columns < width, values, scales, row, width, columns)
    else:
        largest = tl.zeros((TILE,), tl.float32)
        is_wrong = tl.zeros((TILE,), tl.int32)
        for first in range(0, width, TILE):
            loaded = tl.load(own_row + first + columns, mask=first + columns < width, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.where(loaded == loaded, tl.abs(loaded), 0.0))
            is_wrong = is_wrong | (loaded != loaded).to(tl.int32)
        scale = row_scale(tl.max(largest, axis=0), tl.max(is_wrong, axis=0) == 0)
        tl.store(scales + row, scale)
        for first in range(0, width, TILE):
            is_there = first + columns < width
            loaded = tl.load(own_row + first + columns, mask=is_there, other=0.0).to(tl.float32)
            stored = float8_bytes(tl.div_rn(loaded, scale))
            tl.store(values + row * width + first + columns, stored, mask=is_there)
