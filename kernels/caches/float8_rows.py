"""Rows of a cache of FP8 (e4m3), in plain PyTorch: one token's keys (or values) on one layer.

A row holds the elements of all heads, one byte each, and behind them the scale of each head, float32, as bytes: uint8
[kv_heads * head_dim + 4 * kv_heads], as of int8 (`int8_rows`). An element's value is its number times its
head's scale. The scale is the head's largest magnitude / 448, so that a value changes by at most a sixteenth of itself
or a thousandth of its scale; that of a head that is not finite is NaN.
"""

import torch
from torch import Tensor

from kernels.caches.int8_rows import SCALE_BYTES, scaled_heads

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
