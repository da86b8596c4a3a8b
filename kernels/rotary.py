"""Rotary position embedding: pairs (i, i + rotary_dim / 2) of each head are rotated by position * frequency."""

import torch
from torch import Tensor

from kernels.rows import HeadRows, native_level


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


class HeadPlacement:
    """Brings queries and keys to their positions, and keys and values into the cache."""

    __slots__ = ("_head_dim", "_query_width", "_rotated_heads", "_rotated_width", "_rows", "angle_dtype")

    def __init__(self, num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._head_dim = head_dim
        self._rotated_heads = num_heads + kv_heads
        self._query_width, self._rotated_width = num_heads * head_dim, self._rotated_heads * head_dim
        level = native_level(dtype, device)
        self._rows = None if level is None else HeadRows(num_heads, kv_heads, head_dim, dtype, level=level)
        self.angle_dtype = dtype if level is None else torch.float32

    def __call__(
        self, fused: Tensor, rotation: tuple[Tensor, Tensor] | None, slots: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """fused [tokens, (num_heads + 2 * kv_heads) * head_dim]: its queries and keys are rotated in place.

        rotation   cos, sin [tokens, 1, rotary_dim / 2] in `angle_dtype`; None: nothing is rotated
        slots      [tokens] int64, all different: the rows of keys and values that are overwritten
        keys       [slots, kv_heads * head_dim] contiguous; values alike
        """
        if self._rows is not None:
            self._rows(fused, rotation, slots, keys, values)
            return
        if rotation is not None:
            heads = fused.view(fused.shape[0], -1, self._head_dim)
            rotate_(heads[:, : self._rotated_heads], *rotation)
        keys.index_copy_(0, slots, fused[:, self._query_width : self._rotated_width])
        values.index_copy_(0, slots, fused[:, self._rotated_width :])
