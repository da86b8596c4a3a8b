"""Rotary position embedding: pairs (i, i + rotary_dim / 2) of each head are rotated by position * frequency."""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [tokens], inverse_frequencies [rotary_dim / 2] float32 -> cos, sin [tokens, 1, rotary_dim / 2]."""
    angles = positions.to(torch.float32)[:, None, None] * inverse_frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `heads` [tokens, num_heads, head_dim] in place; dimensions from 2 * cos.shape[-1] on stay as they are."""
    half = cos.shape[-1]
    first = heads[..., :half]
    second = heads[..., half : 2 * half]
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    first.copy_(rotated_first)
    second.copy_(rotated_second)
