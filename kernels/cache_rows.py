"""Rows of a cache of 8 bits, in plain PyTorch: one token's keys (or values) on one layer.

A row holds the elements of all heads, a byte each, and behind them the scale of each head, float32, as bytes:
[kv_heads * head_dim + 4 * kv_heads], int8 or (for FP8, e4m3) uint8. A value is an element times its head's scale. The
scale is the head's largest magnitude / 127: int8 changes a value by at most half of it; / 448: FP8 changes a value by
at most a sixteenth of itself or a thousandth of its scale. The scale of a head that is not finite is NaN."""

import torch
from torch import Tensor

SCALE_BYTES = 4
_LARGEST = 127.0
# Heads without an element above this are stored as zeros: the quotient would overflow.
SMALLEST = 1e-30


def int8_row_width(kv_heads: int, head_dim: int) -> int:
    return kv_heads * (head_dim + SCALE_BYTES)


def quantise_rows(heads: Tensor) -> Tensor:
    scaled, scales = scaled_heads(heads, _LARGEST)
    rounded = scaled.round().nan_to_num(0.0).clamp(-_LARGEST, _LARGEST).to(torch.int8)
    return torch.cat((rounded.flatten(1), scales.contiguous().view(torch.int8)), dim=1)


def scaled_heads(heads: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Scale heads [tokens, kv_heads, head_dim], the largest element to `most` -> (float32 of that shape, scales
    [tokens, kv_heads])."""
    x = heads.float()
    largest = x.abs().amax(dim=-1)
    is_zero = largest <= SMALLEST
    factors = torch.where(is_zero, 0.0, most / largest)
    scales = torch.where(is_zero, 0.0, largest / most)
    scales = torch.where(x.isfinite().all(dim=-1), scales, float("nan"))
    return x * factors[..., None], scales


def dequantise_rows(rows: Tensor, kv_heads: int, out: Tensor) -> Tensor:
    """Write the values of rows [tokens, row_width] int8, contiguous, to `out` [tokens, kv_heads * head_dim]; return
    it."""
    width = rows.shape[1] - SCALE_BYTES * kv_heads
    scales = rows[:, width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    elements = rows[:, :width].reshape(rows.shape[0], kv_heads, width // kv_heads)
    out.view(elements.shape).copy_(elements * scales[..., None])
    return out


LARGEST = 448.0


def quantise_float8_rows(heads: Tensor) -> Tensor:
    """Round heads [tokens, kv_heads, head_dim] to rows [tokens, row_width] uint8."""
    scaled, scales = scaled_heads(heads, LARGEST)
    rounded = scaled.nan_to_num(0.0).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return torch.cat((rounded.view(torch.uint8).flatten(1), scales.contiguous().view(torch.uint8)), dim=1)


def dequantise_float8_rows(rows: Tensor, kv_heads: int, out: Tensor) -> Tensor:
    """Write the values of rows [tokens, row_width] uint8, contiguous, to `out` [tokens, kv_heads * head_dim]; return
    it."""
    width = rows.shape[1] - SCALE_BYTES * kv_heads
    scales = rows[:, width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    elements = rows[:, :width].contiguous().view(torch.float8_e4m3fn).float()
    elements = elements.view(rows.shape[0], kv_heads, width // kv_heads)
    out.view(elements.shape).copy_(elements * scales[..., None])
    return out
