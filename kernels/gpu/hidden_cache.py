"""Keys and values recomputed from hidden-cache blocks on a GPU (Apt-Serve, section 4: a request's cache may be its
layer inputs, half the bytes of keys and values with multi-head attention).

One kernel: a tile of cached layer inputs is read through the block table, normalised, multiplied by one head's rows of
the layer's key or value weight, given its bias, and, of keys, rotated to its position; nothing between is written.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching import upcast

_TOKENS, _INPUTS = 32, 64


class HiddenLayer(NamedTuple):
    """What turns a layer's inputs into its keys and values."""

    norm_weight: Tensor  # [hidden_size]
    norm_bias: Tensor | None  # [hidden_size]; None: the norm is of the root mean square
    eps: float
    weight: Tensor  # [2 * kv_heads * head_dim, hidden_size], keys first, contiguous
    bias: Tensor | None  # [2 * kv_heads * head_dim]


def keys_and_values(
    layer: HiddenLayer,
    blocks: Tensor,
    table: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Fill keys and values of the first tokens of one context.

    blocks     [num_blocks, block_size, hidden_size]: one layer's inputs, rows possibly strided in their first dimension
    table      [blocks of the context] int64
    rotation   cos, sin [tokens, rotary_dim / 2] float32; None: keys are not rotated
    keys       [tokens, kv_heads, head_dim] contiguous; values alike
    """
    num_tokens, kv_heads, head_dim = keys.shape
    _, block_size, hidden_size = blocks.shape
    half = 0 if rotation is None else rotation[0].shape[-1]
    # A head is computed as its first and second part, so that a rotation finds both of its elements in one place.
    first = half if half else head_dim // 2
    cos, sin = rotation if rotation is not None else (keys, keys)  # not read without a rotation
    _recompute[(triton.cdiv(num_tokens, _TOKENS), 2 * kv_heads)](
        blocks,
        table,
        layer.norm_weight,
        layer.norm_weight if layer.norm_bias is None else layer.norm_bias,
        layer.weight,
        layer.weight if layer.bias is None else layer.bias,
        cos,
        sin,
        keys,
        values,
        num_tokens,
        blocks.stride(0),
        hidden_size,
        layer.eps,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        FIRST=first,
        HALF=half,
        BLOCK_SIZE=block_size,
        IS_RMS=layer.norm_bias is None,
        HAS_BIAS=layer.bias is not None,
        PART=max(16, triton.next_power_of_2(max(first, head_dim - first))),
        TOKENS=_TOKENS,
        INPUTS=_INPUTS,
        UPCAST=upcast(layer.weight.dtype),
    )


def plain_keys_and_values(
    layer: HiddenLayer, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """The plain reference, in float64. hidden [tokens, hidden_size] -> keys, values [tokens, kv_heads, head_dim]."""
    x = hidden.double()
    if layer.norm_bias is not None:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.norm_weight.double()
    if layer.norm_bias is not None:
        x = x + layer.norm_bias.double()
    fused = x @ layer.weight.double().T
    if layer.bias is not None:
        fused = fused + layer.bias.double()
    keys, values = (part.view(len(x), kv_heads, -1) for part in fused.chunk(2, dim=1))
    if rotation is None:
        return keys, values
    cos, sin = (angle.double()[:, None] for angle in rotation)
    half = cos.shape[-1]
    a, b, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1), values


@triton.jit
def _product(x, weight, rows, columns, inputs, limit, hidden_size, UPCAST: tl.constexpr):
    """x [tokens, inputs] times the rows of the weight from `rows` on, `limit` of them."""
    is_there = (columns < limit)[:, None] & (inputs < hidden_size)[None, :]
    factors = tl.load(weight + (rows + columns)[:, None] * hidden_size + inputs[None, :], mask=is_there, other=0.0)
    if UPCAST:
        factors = factors.to(tl.float32)
    return tl.dot(x.to(factors.dtype), tl.trans(factors), input_precision="ieee")


@triton.jit
def _recompute(
    blocks,
    table,
    norm_weight,
    norm_bias,
    weight,
    bias,
    cos,
    sin,
    keys,
    values,
    num_tokens,
    block_stride,
    hidden_size,
    eps,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_RMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # The heads of one tile of tokens lie side by side in the grid: all but the first find its inputs in the cache.
    head = tl.program_id(1)
    tokens, columns, inputs = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PART), tl.arange(0, INPUTS)
    is_token = tokens < num_tokens
    block = tl.load(table + tokens // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    starts = blocks + block * block_stride + (tokens % BLOCK_SIZE) * hidden_size
    total = tl.zeros((TOKENS,), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    if not IS_RMS:
        for first in range(0, hidden_size, INPUTS):
            is_there = is_token[:, None] & (first + inputs < hidden_size)[None, :]
            total += tl.sum(
                tl.load(starts[:, None] + first + inputs[None, :], mask=is_there, other=0.0).to(tl.float32), axis=1
            )
    mean = total / hidden_size
    for first in range(0, hidden_size, INPUTS):
        is_there = is_token[:, None] & (first + inputs < hidden_size)[None, :]
        x = tl.load(starts[:, None] + first + inputs[None, :], mask=is_there, other=0.0).to(tl.float32)
        x = tl.where(is_there, x - mean[:, None], 0.0)
        squares += tl.sum(x * x, axis=1)
    scale = 1.0 / tl.sqrt(squares / hidden_size + eps)
    lower = tl.zeros((TOKENS, PART), tl.float32)
    upper = tl.zeros((TOKENS, PART), tl.float32)
    row = head.to(tl.int64) * HEAD_DIM
    for first in range(0, hidden_size, INPUTS):
        places = first + inputs
        is_there = is_token[:, None] & (places < hidden_size)[None, :]
        x = tl.load(starts[:, None] + places[None, :], mask=is_there, other=0.0).to(tl.float32)
        x = (x - mean[:, None]) * scale[:, None]
        x = x * tl.load(norm_weight + places, mask=places < hidden_size, other=0.0).to(tl.float32)[None, :]
        if not IS_RMS:
            x = x + tl.load(norm_bias + places, mask=places < hidden_size, other=0.0).to(tl.float32)[None, :]
        lower += _product(x, weight, row, columns, places, FIRST, hidden_size, UPCAST)
        upper += _product(x, weight, row + FIRST, columns, places, HEAD_DIM - FIRST, hidden_size, UPCAST)
    if HAS_BIAS:
        lower += tl.load(bias + row + columns, mask=columns < FIRST, other=0.0).to(tl.float32)[None, :]
        upper += tl.load(bias + row + FIRST + columns, mask=columns < HEAD_DIM - FIRST, other=0.0).to(tl.float32)[
            None, :
        ]
    if HALF > 0 and head < KV_HEADS:
        is_angle = is_token[:, None] & (columns < HALF)[None, :]
        c = tl.load(cos + tokens[:, None] * HALF + columns[None, :], mask=is_angle, other=1.0)
        s = tl.load(sin + tokens[:, None] * HALF + columns[None, :], mask=is_angle, other=0.0)
        turned = lower * c - upper * s
        upper = upper * c + lower * s
        lower = turned
    out = keys if head < KV_HEADS else values
    within = (tokens.to(tl.int64) * KV_HEADS + head % KV_HEADS) * HEAD_DIM
    is_lower, is_upper = (
        is_token[:, None] & (columns < FIRST)[None, :],
        is_token[:, None] & (columns < HEAD_DIM - FIRST)[None, :],
    )
    tl.store(out + within[:, None] + columns[None, :], lower.to(out.dtype.element_ty), mask=is_lower)
    tl.store(out + within[:, None] + FIRST + columns[None, :], upper.to(out.dtype.element_ty), mask=is_upper)
