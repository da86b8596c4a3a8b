"""Rotary position embedding: pairs (i, i + rotary_dim / 2) of each head are rotated by position * frequency."""

import torch
from torch import Tensor

from kernels.activation import rms_norm
from kernels.cache_rows import quantise_float8_rows, quantise_rows
from kernels.cpu.rows import HeadRows, NormRows, native_level
from kernels.gpu_dispatch import fused_kernels

# How heads are rounded for a cache of these elements.
_ROUNDED = {torch.int8: quantise_rows, torch.uint8: quantise_float8_rows}


def rotary_angles(
    positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute positions [tokens], inverse_frequencies [rotary_dim / 2] float32 -> factor * cos, factor * sin
    [tokens, 1, rotary_dim / 2]; positions may be of each pair as well [tokens, 1, rotary_dim / 2]."""
    positions = positions.to(torch.float32)
    angles = (positions[:, None, None] if positions.ndim == 1 else positions) * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos.mul_(factor), sin.mul_(factor)
    return cos.to(dtype), sin.to(dtype)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `heads` [tokens, num_heads, head_dim] in place; dimensions from 2 * cos.shape[-1] on stay as they are."""
    half = cos.shape[-1]
    first = heads[..., :half]
    second = heads[..., half : 2 * half]
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    first.copy_(rotated_first)
    second.copy_(rotated_second)


class HeadNorms:
    """The root mean square norms that some families apply to queries and keys."""

    __slots__ = ("_rows", "eps", "is_after_rotation", "is_whole", "keys", "queries", "values")

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        eps: float,
        dtype: torch.dtype | None = None,
        *,
        is_whole: bool = False,
        is_after_rotation: bool = False,
        values: Tensor | None = None,
    ) -> None:
        """`queries`, `keys`: weights [head_dim], or of all heads together if the norm `is_whole`. `dtype`: of the rows,
        where the weights' is float32 and theirs is not. `values`: a weight for values, which are normalised as well."""
        self.queries, self.keys, self.eps = queries, keys, eps
        self.is_whole, self.is_after_rotation, self.values = is_whole, is_after_rotation, values
        dtype = dtype or queries.dtype
        level = native_level(dtype, queries.device)
        # Of queries, of keys, and of values if they have any; None: they do not run here.
        self._rows: tuple[NormRows, ...] | None = None
        if level is not None:
            weights = (queries, keys) if values is None else (queries, keys, values)
            self._rows = tuple(
                [NormRows(weight, None, eps, is_rms=True, level=level, dtype=dtype) for weight in weights]
            )

    @property
    def is_by_head(self) -> bool:
        """Return whether each head is normalised alone, before it is rotated: what kernels do on the way."""
        return not (self.is_whole or self.is_after_rotation or self.values is not None)

    @property
    def native_heads(self) -> tuple[NormRows, NormRows] | None:
        """Return the native kernels of heads that are normalised alone; None: they do not run here, or it is another
        norm."""
        return (self._rows[0], self._rows[1]) if self.is_by_head and self._rows is not None else None

    def normalise_(self, queries: Tensor, *others: Tensor) -> None:
        """Normalise queries, keys and values [tokens, heads, head_dim], the first of these, in place, also strided."""
        weights = (self.queries, self.keys, self.values)
        for index, heads in enumerate((queries, *others)):
            weight = weights[index]
            assert weight is not None, "values without a norm"
            rows = heads.flatten(1) if self.is_whole else heads
            if self._rows is None:
                normalised = rms_norm(rows, weight, self.eps)
            else:
                normalised = self._rows[index](rows.reshape(-1, rows.shape[-1]))
            heads.copy_(normalised.view(heads.shape))


class HeadPlacement:
    """Rotates queries and keys by their positions, and writes keys and values, or keys alone, to the cache."""

    __slots__ = ("_fused", "_has_values", "_head_dim", "_kv_heads", "_num_heads", "_rows", "angle_dtype")

    def __init__(
        self,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_values: bool = True,
    ) -> None:
        """`has_values`: False: the cached keys are the values too."""
        self._num_heads, self._kv_heads, self._head_dim = num_heads, kv_heads, head_dim
        self._has_values = has_values
        kernels = fused_kernels("head_placement", device, dtype) if has_values else None
        self._fused = None if kernels is None else kernels.HeadRowsKernel(num_heads, kv_heads, head_dim)
        level = native_level(dtype, device)
        self._rows = None
        if level is not None:
            self._rows = HeadRows(num_heads, kv_heads, head_dim, dtype, level=level, has_values=has_values)
        is_plain = self._fused is None and self._rows is None
        self.angle_dtype = dtype if is_plain else torch.float32

    @property
    def native_rows(self) -> HeadRows | None:
        """Return the native kernel, where it runs."""
        return self._rows

    def __call__(
        self,
        fused: Tensor,
        norms: HeadNorms | None,
        rotation: tuple[Tensor, Tensor] | None,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Place fused [tokens, (num_heads + 2 * kv_heads) * head_dim]: queries and keys are normalised and rotated in
        place. Without values there are kv_heads fewer, and `values` is not read.

        norms      None: heads are rotated as they are
        rotation   cos, sin [tokens, 1, rotary_dim / 2] in `angle_dtype`; None: nothing is rotated
        slots      [tokens] int64, all different: the rows of keys and values that are overwritten
        keys       [slots, kv_heads * head_dim] contiguous, or rows of FP8 (`caches.float8_rows`), or on a CPU of int8
                   (`kernels.cache_rows`); values alike"""
        if self._fused is not None and (norms is None or norms.is_by_head):
            self._fused(fused, norms, rotation, slots, keys, values)
            return
        heads = fused.view(fused.shape[0], -1, self._head_dim)
        first_value = self._num_heads + self._kv_heads
        if norms is not None:
            if norms.is_after_rotation and rotation is not None:
                rotate_(heads[:, :first_value], *rotation)
                rotation = None
            norms.normalise_(heads[:, : self._num_heads], heads[:, self._num_heads : first_value])
        if self._fused is not None:
            self._fused(fused, None, rotation, slots, keys, values)
            return
        is_float8 = keys.dtype == torch.uint8
        if self._rows is not None and not is_float8:
            self._rows(fused, rotation, slots, keys, values)
            return
        if rotation is not None:
            rotate_(heads[:, :first_value], *rotation)
        placed = ((keys, heads[:, self._num_heads : first_value]), (values, heads[:, first_value:]))
        for cached, rows in placed[: 2 if self._has_values else 1]:
            cached.index_copy_(0, slots, _ROUNDED[cached.dtype](rows) if cached.dtype in _ROUNDED else rows.flatten(1))
