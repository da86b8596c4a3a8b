"""The GPU's kernels as one step of a stream each, in plain PyTorch: for schedules by the thousand.

Triton's interpreter takes some hundred times as long. What surrounds the kernels (plans, tables, graphs, padding,
streams) is the project's own.
"""

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from alignedserve.runtime.attention import triton_backend
from alignedserve.runtime.engine.sampling import sampler
from kernels import activation, gpu_dispatch, rotary, sampling
from kernels.attention import ScoreForm
from kernels.gpu.blocks import BlockTables, BlockView
from kernels.sampling import RowParameters
from tests.support.fake_cuda.fakes import current


@contextlib.contextmanager
def quick_kernels() -> Iterator[None]:
    """Compute so within the body what Triton's kernels do for a model in float32; PyTorch does all else."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(triton_backend, "paged_decode", _decode))
        stack.enter_context(mock.patch.object(triton_backend, "paged_prefill", _prefill))
        stack.enter_context(mock.patch.object(gpu_dispatch, "wants_fused_kernels", return_value=False))
        for module in (rotary, activation, sampler):
            stack.enter_context(mock.patch.object(module, "fused_kernels", _module))
        yield


def _module(name: str, device: torch.device, dtype: torch.dtype) -> Any | None:
    return _MODULES.get(name) if device.type == "cuda" and dtype == torch.float32 else None


class _RowNorm:
    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_rms: bool) -> None:
        self._weight, self._bias, self._eps, self._is_rms = weight, bias, eps, is_rms

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        alias, out = current().alias, torch.empty_like(x)
        bias = None if self._bias is None else alias(self._bias)
        own, target, weight, shape = alias(x), alias(out), alias(self._weight), tuple(self._weight.shape)
        added = None if residual is None else alias(residual)

        def work() -> None:
            rows = own if added is None else added.add_(own)
            if self._is_rms:
                target.copy_(functional.rms_norm(rows, shape, weight, self._eps))
            else:
                target.copy_(functional.layer_norm(rows, shape, weight, bias, self._eps))

        current().enqueue("row_norm", work, (x, self._weight), (out,) if residual is None else (out, residual))
        return out


class _Gates:
    def __init__(self, name: str) -> None:
        self._activation = name

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty((len(x), x.shape[1] // 2), dtype=x.dtype, device=x.device)
        own, target = current().alias(x), current().alias(out)
        current().enqueue("gate", lambda: target.copy_(activation.gated(own.clone(), self._activation)), (x,), (out,))
        return out


class _HeadRows:
    def __init__(self, num_heads: int, kv_heads: int, head_dim: int) -> None:
        self._sizes = (num_heads, kv_heads, head_dim)

    def __call__(self, fused: Tensor, norms: Any, rotation: Any, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        assert norms is None, "norms of heads are not among the quick kernels"
        num_heads, kv_heads, head_dim = self._sizes
        alias, first_value = current().alias, num_heads + kv_heads
        own, places, cached = alias(fused), alias(slots), (alias(keys), alias(values))
        angles = None if rotation is None else tuple(map(alias, rotation))

        def work() -> None:
            heads = own.view(len(own), num_heads + 2 * kv_heads, head_dim)
            if angles is not None:
                rotary.rotate_(heads[:, :first_value], *angles)
            for target, part in zip(cached, (heads[:, num_heads:first_value], heads[:, first_value:]), strict=True):
                target.index_copy_(0, places, part.flatten(1))

        current().enqueue("place", work, (fused, slots, *(rotation or ())), (fused, keys, values))


def _sample_tokens(logits: Tensor, parameters: RowParameters) -> tuple[Tensor, Tensor]:
    alias, count = current().alias, len(logits)
    token_ids = torch.empty(count, dtype=torch.int64, device=logits.device)
    is_usable = torch.empty(count, dtype=torch.bool, device=logits.device)
    own, chosen, usable, rows = (
        alias(logits),
        alias(token_ids),
        alias(is_usable),
        RowParameters(*map(alias, parameters)),
    )

    def work() -> None:
        for target, value in zip((chosen, usable), sampling.greedy(own), strict=True):
            target.copy_(value)
        at = rows.temperatures > 0
        filters = sampling.Filters(rows.top_k[at], rows.top_p[at], rows.min_p[at])
        if at.any():
            warm = own[at] / rows.temperatures[at, None]
            chosen[at], usable[at] = sampling.sample(warm, filters, rows.draws[at])

    current().enqueue("sample", work, (logits, *parameters), (token_ids, is_usable))
    return token_ids, is_usable


_MODULES = {
    "row_norm": SimpleNamespace(RowNorm=_RowNorm),
    "gating": SimpleNamespace(Gates=_Gates),
    "head_placement": SimpleNamespace(HeadRowsKernel=_HeadRows),
    "token_sampling": SimpleNamespace(sample_tokens=_sample_tokens, MOST_TOKENS=1 << 20),
}


def _decode(queries: Tensor, out: Tensor, view: BlockView, batch: Any, **form: Any) -> None:
    own, read = _arguments(queries, view, batch.tables)
    target, lengths = current().alias(out), current().alias(batch.lengths)

    def work() -> None:
        for row, length in enumerate(lengths.tolist()):
            keys, values = read(row, length)
            target[row] = _attended(own[row : row + 1], keys, values, **form)[0]

    current().enqueue("paged_decode", work, (queries, view.blocks, batch.lengths, *batch.tables), (out,))


def _prefill(queries: Tensor, out: Tensor, view: BlockView, batch: Any, **form: Any) -> None:
    own, read = _arguments(queries, view, batch.tables)
    target, tiles = current().alias(out), [current().alias(part) for part in batch.tiles]

    def work() -> None:
        for sequence, row, position, count in zip(*(part.tolist() for part in tiles), strict=True):
            keys, values = read(sequence, position + count)
            target[row : row + count] = _attended(own[row : row + count], keys, values, **form)

    current().enqueue("paged_prefill", work, (queries, view.blocks, *batch.tables, *batch.tiles), (out,))


def _arguments(queries: Tensor, view: BlockView, tables: BlockTables) -> tuple[Tensor, Any]:
    alias = current().alias
    blocks = alias(view.blocks)
    entries, starts, is_reversed = map(alias, tables)

    def read(row: int, length: int) -> tuple[Tensor, Tensor]:
        first, size = int(starts[row]), blocks.shape[3]
        places = entries[first : first + -(-length // size)].long()
        cached = blocks[places, view.layer]
        if is_reversed[row]:
            cached = cached.flip(2)
        return cached[:, 0].flatten(0, 1)[:length], cached[:, 1].flatten(0, 1)[:length]

    return alias(queries), read


def _attended(
    queries: Tensor, keys: Tensor, values: Tensor, window: int | None, is_chunked: bool, scores: ScoreForm
) -> Tensor:
    """Attend [tokens, heads, group, dim], the last tokens of the context, to [context, heads, dim]."""
    assert scores.is_plain, "sinks and caps are the kernels' own"
    assert not is_chunked, "so are contexts in chunks"
    count, length = len(queries), len(keys)
    weights = torch.einsum("nhgd,thd->nhgt", queries.float(), keys.float()) / math.sqrt(queries.shape[-1])
    ends = torch.arange(length - count, length)[:, None]
    places = torch.arange(length)[None, :]
    is_read = places <= ends if window is None else (places <= ends) & (places > ends - window)
    weights.masked_fill_(~is_read[:, None, None, :], -math.inf)
    return torch.einsum("nhgt,thd->nhgd", weights.softmax(-1), values.float()).to(queries.dtype)
