"""Attention over keys and values that lie in blocks, in plain PyTorch.

Decode: one query token per sequence. The blocks of a few sequences of similar length are gathered into a buffer that
fits the cache, and one scaled dot product is taken over them. Query heads that share a key head are the rows of one
product ("grouped view"), so that no key is read twice.

Chunk: several new tokens of one sequence on top of its cached context, with a causal mask.

Scores, softmax and sums are float32 whatever the dtype. Every slot that is gathered must hold finite numbers (the
engine zeroes a block before its first use); which of them count is up to the mask."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cache_rows import dequantise_float8_rows, dequantise_rows, int8_row_width

# With fewer query rows per key head than this, 16-bit products run slower on a CPU than converting to float32 first:
# 64 sequences x 64 tokens x 12 heads: 3.2 ms as bfloat16, 1.45 ms converted (two cores, Zen 4).
_MIN_GROUP_16_BIT = 4

# How rows of a cache of these elements are read.
_ROUNDED = {torch.int8: dequantise_rows, torch.uint8: dequantise_float8_rows}


class ScoreForm(NamedTuple):
    """What becomes of scores, beside their scale, before they are weights."""

    sinks: Tensor | None = None  # float32 [layers, heads]: the score of a key without value that every query reads
    cap: float | None = None  # c: a score s becomes c * tanh(s / c)

    @property
    def is_plain(self) -> bool:
        """Return whether scores are weights' exponents as they are."""
        return self.sinks is None and self.cap is None

    def of_layer(self, layer: int) -> "ScoreForm":
        """Return the form with the sinks [heads] of one layer."""
        return self if self.sinks is None else self._replace(sinks=self.sinks[layer])


PLAIN_SCORES = ScoreForm()


class RunSelection(NamedTuple):
    """Blocks' runs of slots that are gathered one after another."""

    ids: Tensor  # [runs] int64: rows of BlockStorage.key_runs
    reversed_at: Tensor | None = None  # int64: places in `ids` of runs whose last slot is read first; None: of none


class GatherBuffers:
    """Buffers that grow to the largest gather and are reused: new memory would cost a page fault per 4 KB."""

    __slots__ = ("_device", "_tensors")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return a contiguous [rows, width] buffer of arbitrary content, valid until the next call with this name."""
        size = rows * width
        tensor = self._tensors.get((name, dtype))
        if tensor is None or tensor.numel() < size:
            tensor = torch.empty(size, dtype=dtype, device=self._device)
            self._tensors[name, dtype] = tensor
        return tensor[:size].view(rows, width)


def attend_decode(
    queries: Tensor,
    key_runs: Tensor,
    value_runs: Tensor,
    runs: RunSelection,
    mask: Tensor,
    buffers: GatherBuffers,
    scores: ScoreForm = PLAIN_SCORES,
) -> Tensor:
    """Compute attention of one query token for each of `sequences` sequences.

    queries    [sequences, kv_heads, group, head_dim]
    key_runs   [runs, block_size * kv_heads * head_dim], or int8 [runs, block_size * row_width] (`caches.int8_rows`);
               value_runs alike
    runs       of each sequence's blocks [sequences * blocks], padded to the same number
    mask       [sequences, 1, 1, blocks * block_size] float32: 0 where a slot counts, -inf elsewhere
    scores     with the sinks of this layer
    returns    [sequences, kv_heads, group, head_dim], dtype of queries"""
    count, kv_heads, group, head_dim = queries.shape
    dtype = queries.dtype
    keys = _gather(key_runs, runs, (kv_heads, head_dim), dtype, "keys", buffers)
    values = _gather(value_runs, runs, (kv_heads, head_dim), dtype, "values", buffers)
    if dtype != torch.float32 and queries.device.type == "cpu" and group < _MIN_GROUP_16_BIT:
        keys = _as_float32(keys, "keys", buffers)
        values = _as_float32(values, "values", buffers)
        queries = queries.float()
    elif queries.device.type != "cpu":
        mask = mask.to(dtype)
    shape = (count, -1, kv_heads, head_dim)
    if not scores.is_plain:
        keys, values = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
        return _attend(queries, keys, values, mask, scores).to(dtype)
    attended = functional.scaled_dot_product_attention(
        queries, keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2), attn_mask=mask
    )
    return attended.to(dtype)


def attend_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: ScoreForm = PLAIN_SCORES
) -> Tensor:
    """Compute attention of several new tokens of one sequence.

    queries    [tokens, kv_heads, group, head_dim]
    keys       [context, kv_heads, head_dim]; values alike; the new tokens are the last of the context
    mask       [tokens, context] float32 or dtype of queries, 0 or -inf; None: context is the new tokens alone, causal
    scores     with the sinks of this layer
    returns    [tokens, kv_heads, group, head_dim]"""
    if not scores.is_plain:
        if mask is None:
            hidden = torch.ones(len(queries), len(keys), dtype=torch.bool, device=keys.device).triu_(1)
            mask = torch.zeros(hidden.shape, device=keys.device).masked_fill_(hidden, -torch.inf)
        # [kv_heads, context, head_dim] for every token; its own row of the mask.
        return _attend(queries, keys.transpose(0, 1), values.transpose(0, 1), mask[:, None, None], scores)
    group = queries.shape[2]
    # Key heads as the batch, the group as heads of stride 0: no key is copied.
    expanded = (-1, group, -1, -1)
    attended = functional.scaled_dot_product_attention(
        queries.permute(1, 2, 0, 3),
        keys.permute(1, 0, 2)[:, None].expand(expanded),
        values.permute(1, 0, 2)[:, None].expand(expanded),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return attended.permute(2, 0, 1, 3)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, form: ScoreForm) -> Tensor:
    """Compute attention of queries [rows, kv_heads, group, head_dim] to keys and values [.., kv_heads, context,
    head_dim], with a mask [rows, 1, 1, context]; scores are of this form."""
    scores = (queries.float() @ keys.float().transpose(-1, -2)) / math.sqrt(queries.shape[-1])
    if form.cap is not None:
        scores = (scores / form.cap).tanh_().mul_(form.cap)
    scores = scores + mask
    if form.sinks is not None:
        sinks = form.sinks.view(1, *queries.shape[1:3], 1).expand(len(queries), -1, -1, -1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(queries.dtype)


def gather_context(
    cached: Tensor,
    runs: RunSelection,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    name: str,
    buffers: GatherBuffers,
) -> Tensor:
    """Gather the first slots of the selected runs as `shape` (context_len, kv_heads, head_dim) into a buffer.

    `dtype`: of the result; also that of the runs, unless they are int8."""
    context_len, kv_heads, head_dim = shape
    gathered = _gather(cached, runs, (kv_heads, head_dim), dtype, name, buffers)
    return gathered.view(-1, kv_heads, head_dim)[:context_len]


def _gather(
    cached: Tensor, runs: RunSelection, heads: tuple[int, int], dtype: torch.dtype, name: str, buffers: GatherBuffers
) -> Tensor:
    gathered = buffers.take(name, len(runs.ids), cached.shape[1], cached.dtype)
    torch.index_select(cached, 0, runs.ids, out=gathered)
    kv_heads, head_dim = heads
    if runs.reversed_at is not None:
        width = int8_row_width(kv_heads, head_dim) if cached.dtype in _ROUNDED else kv_heads * head_dim
        slots = gathered.view(len(gathered), -1, width)
        slots[runs.reversed_at] = slots[runs.reversed_at].flip(1)
    if cached.dtype not in _ROUNDED:
        return gathered
    rows = gathered.view(-1, int8_row_width(kv_heads, head_dim))
    values = buffers.take(name, len(rows), kv_heads * head_dim, dtype)
    return _ROUNDED[cached.dtype](rows, kv_heads, values).view(len(runs.ids), -1)


def _as_float32(gathered: Tensor, name: str, buffers: GatherBuffers) -> Tensor:
    rows, width = gathered.shape
    return buffers.take(name, rows, width, torch.float32).copy_(gathered)
