"""Queries and keys normalised head by head and rotated, keys and values put into the cache, on a GPU in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cache_rows import LARGEST, SMALLEST
from kernels.gpu.blocks import float8_bytes
from kernels.gpu.launching import parts_of, power_of_two
from kernels.rotary import HeadNorms

_HEADS = 8  # of one program
_LARGEST, _SMALLEST, _FINITE = tl.constexpr(LARGEST), tl.constexpr(SMALLEST), tl.constexpr(3.4e38)


class HeadRowsKernel:
    """Places the heads of a model's layers."""

    __slots__ = ("_head_dim", "_kv_heads", "_num_heads")

    def __init__(self, num_heads: int, kv_heads: int, head_dim: int) -> None:
        self._num_heads = num_heads
        self._kv_heads = kv_heads
        self._head_dim = head_dim

    def __call__(
        self,
        fused: Tensor,
        norm: HeadNorms | None,
        rotation: tuple[Tensor, Tensor] | None,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Place fused [tokens, (num_heads + 2 * kv_heads) * head_dim]: its queries and keys are changed in place.

        norm       None: heads stay as they are before the rotation
        rotation   cos, sin [tokens, 1, rotary_dim / 2] float32, contiguous; None: nothing is rotated
        slots      [tokens] int64, all different: rows of keys and values to be overwritten; not checked
        keys       [slots, kv_heads * head_dim] contiguous, or rows of FP8 (`kernels.cache_rows`); values alike"""
        count, head_dim = fused.shape[0], self._head_dim
        all_heads = self._num_heads + 2 * self._kv_heads
        assert fused.shape[1] == all_heads * head_dim, f"not rows of queries, keys and values: {fused.shape}"
        if not count:
            return
        half = 0 if rotation is None else rotation[0].shape[-1]
        # A head is read in two halves, so that both elements of a rotated pair are at hand.
        first = half if half else head_dim // 2
        # Absent tensors are not read, but a pointer must be passed.
        weights = (fused, fused, 0.0) if norm is None else (norm.queries, norm.keys, norm.eps)
        query_weight, key_weight, eps = weights
        cos, sin = rotation if rotation is not None else (fused, fused)
        _place[(count, parts_of(all_heads, _HEADS))](
            fused,
            query_weight,
            key_weight,
            cos,
            sin,
            slots,
            keys,
            values,
            fused.stride(0),
            eps,
            NUM_HEADS=self._num_heads,
            KV_HEADS=self._kv_heads,
            HEAD_DIM=head_dim,
            FIRST=first,
            HALF=half,
            HAS_NORM=norm is not None,
            PART=power_of_two(max(first, head_dim - first)),
            HEADS=_HEADS,
            IS_FLOAT8=keys.dtype == torch.uint8,
        )


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch once on a tiny input. Raises the errors of the launch."""
    angles = torch.ones((1, 1, 8), device=device)
    weight = torch.ones(16, dtype=dtype, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    fused, cached = weight.repeat(3)[None], weight.clone()[None]
    HeadRowsKernel(1, 1, 16)(fused, HeadNorms(weight, weight, 1e-6), (angles, angles), slots, cached, cached.clone())


@triton.jit
def _weights(query_weight, key_weight, is_key, dims, limit):
    is_there = (dims < limit)[None, :]
    places = dims[None, :]
    of_queries = tl.load(query_weight + places, mask=is_there, other=0.0).to(tl.float32)
    of_keys = tl.load(key_weight + places, mask=is_there, other=0.0).to(tl.float32)
    return tl.where(is_key[:, None], of_keys, of_queries)


@triton.jit
def _head_scales(lower, upper):
    largest = tl.maximum(tl.max(tl.abs(lower), axis=1), tl.max(tl.abs(upper), axis=1))
    # Neither infinities nor NaN, which a maximum alone may skip.
    is_finite = (tl.min((tl.abs(lower) <= _FINITE).to(tl.int32), axis=1) == 1) & (
        tl.min((tl.abs(upper) <= _FINITE).to(tl.int32), axis=1) == 1
    )
    is_zero = largest <= _SMALLEST
    factors = tl.where(is_zero | ~is_finite, 0.0, _LARGEST / tl.where(is_zero, 1.0, largest))
    return tl.where(is_finite, tl.where(is_zero, 0.0, largest / _LARGEST), float("nan")), factors


@triton.jit
def _float8(x, factors):
    x = x * factors[:, None]
    x = tl.where(x == x, x, 0.0)
    return float8_bytes(x)


@triton.jit
def _place(
    fused,
    query_weight,
    key_weight,
    cos,
    sin,
    slots,
    keys,
    values,
    fused_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PART: tl.constexpr,
    HEADS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads, columns = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, PART)
    is_head = heads < NUM_HEADS + 2 * KV_HEADS
    is_value = heads >= NUM_HEADS + KV_HEADS
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + KV_HEADS)
    is_lower = is_head[:, None] & (columns < FIRST)[None, :]
    is_upper = is_head[:, None] & (columns < HEAD_DIM - FIRST)[None, :]
    pointers = fused + token * fused_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    element = fused.dtype.element_ty
    lower = tl.load(pointers, mask=is_lower, other=0.0).to(tl.float32)
    upper = tl.load(pointers + FIRST, mask=is_upper, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(lower * lower, axis=1) + tl.sum(upper * upper, axis=1)
        root = tl.sqrt(squares / HEAD_DIM + eps)[:, None]
        # Rounded as a separate norm and rotation would round.
        normed_lower = (lower / root).to(element).to(tl.float32)
        normed_upper = (upper / root).to(element).to(tl.float32)
        normed_lower *= _weights(query_weight, key_weight, is_key, columns, FIRST)
        normed_upper *= _weights(query_weight + FIRST, key_weight + FIRST, is_key, columns, HEAD_DIM - FIRST)
        lower = tl.where(is_value[:, None], lower, normed_lower.to(element).to(tl.float32))
        upper = tl.where(is_value[:, None], upper, normed_upper.to(element).to(tl.float32))
    if HALF > 0:
        is_angle = columns < HALF
        c = tl.load(cos + token * HALF + columns, mask=is_angle, other=1.0)[None, :]
        s = tl.load(sin + token * HALF + columns, mask=is_angle, other=0.0)[None, :]
        turned_lower, turned_upper = lower * c - upper * s, upper * c + lower * s
        lower = tl.where(is_value[:, None], lower, turned_lower)
        upper = tl.where(is_value[:, None], upper, turned_upper)
    placed_lower, placed_upper = lower.to(element), upper.to(element)
    if HAS_NORM or HALF > 0:
        tl.store(pointers, placed_lower, mask=is_lower & ~is_value[:, None])
        tl.store(pointers + FIRST, placed_upper, mask=is_upper & ~is_value[:, None])
    slot_width: tl.constexpr = KV_HEADS * (HEAD_DIM + 4) if IS_FLOAT8 else KV_HEADS * HEAD_DIM
    slot = tl.load(slots + token) * slot_width
    if IS_FLOAT8:
        placed_lower, placed_upper = placed_lower.to(tl.float32), placed_upper.to(tl.float32)
        scales, factors = _head_scales(placed_lower, placed_upper)
        placed_lower, placed_upper = _float8(placed_lower, factors), _float8(placed_upper, factors)
        # Behind all heads; of each its number among the keys, or the values.
        scale_at = slot + KV_HEADS * HEAD_DIM + (heads - NUM_HEADS) * 4
        tl.store((keys + scale_at).to(tl.pointer_type(tl.float32), bitcast=True), scales, mask=is_key)
        scale_at -= KV_HEADS * 4
        is_own = is_head & is_value
        tl.store((values + scale_at).to(tl.pointer_type(tl.float32), bitcast=True), scales, mask=is_own)
    key_at = slot + (heads - NUM_HEADS)[:, None] * HEAD_DIM + columns[None, :]
    tl.store(keys + key_at, placed_lower, mask=is_lower & is_key[:, None])
    tl.store(keys + key_at + FIRST, placed_upper, mask=is_upper & is_key[:, None])
    value_at = key_at - KV_HEADS * HEAD_DIM
    tl.store(values + value_at, placed_lower, mask=is_lower & is_value[:, None])
    tl.store(values + value_at + FIRST, placed_upper, mask=is_upper & is_value[:, None])
