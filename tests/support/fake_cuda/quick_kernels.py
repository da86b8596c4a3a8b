"""Attention over blocks as one step of a stream each, in plain PyTorch: for schedules by the thousand.

Triton's interpreter takes some hundred times as long. What surrounds the kernels (plans, tables, graphs, padding,
streams) is the project's own.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from alignedserve.runtime.attention import triton_backend
from kernels import gpu_dispatch
from kernels.gpu.blocks import BlockTables, BlockView
from tests.support.fake_cuda.fakes import current


@contextlib.contextmanager
def quick_kernels() -> Iterator[None]:
    """Compute attention so within the body, and all else by PyTorch's own operations."""
    with (
        mock.patch.object(triton_backend, "paged_decode", _decode),
        mock.patch.object(triton_backend, "paged_prefill", _prefill),
        mock.patch.object(gpu_dispatch, "wants_fused_kernels", return_value=False),
    ):
        yield


def _decode(queries: Tensor, out: Tensor, view: BlockView, batch: Any, *, window: int | None = None) -> None:
    own, read = _arguments(queries, view, batch.tables)
    target, lengths = current().alias(out), current().alias(batch.lengths)

    def work() -> None:
        for row, length in enumerate(lengths.tolist()):
            keys, values = read(row, length)
            target[row] = _attended(own[row : row + 1], keys, values, window)[0]

    current().enqueue("paged_decode", work, (queries, view.blocks, batch.lengths, *batch.tables), (out,))


def _prefill(queries: Tensor, out: Tensor, view: BlockView, batch: Any, *, window: int | None = None) -> None:
    own, read = _arguments(queries, view, batch.tables)
    target, tiles = current().alias(out), [current().alias(part) for part in batch.tiles]

    def work() -> None:
        for sequence, row, position, count in zip(*(part.tolist() for part in tiles), strict=True):
            keys, values = read(sequence, position + count)
            target[row : row + count] = _attended(own[row : row + count], keys, values, window)

    current().enqueue("paged_prefill", work, (queries, view.blocks, *batch.tables, *batch.tiles), (out,))


def _arguments(queries: Tensor, view: BlockView, tables: BlockTables) -> tuple[Tensor, Any]:
    alias = current().alias
    blocks = alias(view.blocks)
    # The scratch block lies right behind those of the view.
    blocks = blocks.as_strided((len(blocks) + 1, *blocks.shape[1:]), blocks.stride(), blocks.storage_offset())
    entries, starts, is_reversed = map(alias, tables)

    def read(row: int, length: int) -> tuple[Tensor, Tensor]:
        first, size = int(starts[row]), blocks.shape[3]
        places = entries[first : first + -(-length // size)].long()
        cached = blocks[places, view.layer]
        if is_reversed[row]:
            cached = cached.flip(2)
        return cached[:, 0].flatten(0, 1)[:length], cached[:, 1].flatten(0, 1)[:length]

    return alias(queries), read


def _attended(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Attend [tokens, heads, group, dim], the last tokens of the context, to [context, heads, dim]."""
    count, length = len(queries), len(keys)
    scores = torch.einsum("nhgd,thd->nhgt", queries.float(), keys.float()) / math.sqrt(queries.shape[-1])
    ends = torch.arange(length - count, length)[:, None]
    places = torch.arange(length)[None, :]
    is_read = places <= ends if window is None else (places <= ends) & (places > ends - window)
    scores.masked_fill_(~is_read[:, None, None, :], -math.inf)
    return torch.einsum("nhgt,thd->nhgd", scores.softmax(-1), values.float()).to(queries.dtype)
