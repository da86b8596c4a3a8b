"""Stand-ins for libraries that compute prompts and chunks: plain ones, ones that misbehave, and ones with the arguments
of real ones."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from alignedserve.runtime.attention.libraries import (
    AttentionLibrary,
    Pages,
)
from tests.support.kernel_reference import attention_of_chunk


def attended(parts: list[tuple[Tensor, Tensor, Tensor]], window: int | None, like: Tensor) -> Tensor:
    return torch.cat([attention_of_chunk(*part, window) for part in parts]).to(like.dtype)


def plain_whole(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int | None) -> Tensor:
    bounds = list(pairwise(starts.tolist()))
    assert longest == max(last - first for first, last in bounds)
    return attended([(q[first:last], k[first:last], v[first:last]) for first, last in bounds], window, q)


def plain_paged(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    bounds, lengths = list(pairwise(pages.starts.tolist())), pages.lengths.tolist()
    assert pages.longest_chunk == max(last - first for first, last in bounds)
    assert pages.longest_context == max(lengths)
    assert {pages.starts.dtype, pages.lengths.dtype, pages.table.dtype} == {torch.int32}
    parts = []
    for (first, last), length, blocks in zip(bounds, lengths, pages.table.long(), strict=True):
        own = [cache[blocks].flatten(0, 1)[:length] for cache in (k, v)]
        parts.append((q[first:last], *own))
    return attended(parts, window, q)  # type: ignore[arg-type]


PLAIN = AttentionLibrary("plain", plain_whole, plain_paged)


def slots_of(cache: Tensor, pages: Pages, index: int) -> Tensor:
    """Return all slots of a context's blocks."""
    blocks = pages.table[index, : -(-int(pages.lengths[index]) // cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)


def without_guard(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    """Multiply values of unused slots by zero."""
    out = plain_paged(q, k, v, pages, window)
    for index, (first, last) in enumerate(pairwise(pages.starts.tolist())):
        out[first:last] += 0.0 * slots_of(v, pages, index).sum()
    return out


def with_narrow_offsets(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    """Compute where a page begins with too few bits: half of the storage's."""
    return plain_paged(q, k, v, pages._replace(table=pages.table % 20), window)


def on_the_first_layer(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    """Take layers for tightly packed."""
    keys, values = (cache.as_strided(cache.shape, cache.stride(), 0) for cache in (k, v))
    return plain_paged(q, keys, values, pages, window)


def writing_behind(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    q.as_strided((1,), (1,), q.storage_offset() + q.numel()).fill_(0.0)
    return plain_paged(q, k, v, pages, window)


def writing_elsewhere(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    v[0, 1, 0, 3] = 1.0  # of nobody's block
    return plain_paged(q, k, v, pages, window)


def writing_into_the_cache(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
    out = plain_paged(q, k, v, pages, window)
    v[int(pages.table[0, 0]), 1, 0, 3] = 1.0
    return out


def fails(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image is available")


def with_stale_memory() -> Callable[..., Tensor]:
    """Return a library that multiplies what its last call has left behind by zero."""
    left = [torch.zeros(())]

    def paged(q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None) -> Tensor:
        out = plain_paged(q, k, v, pages, window) + 0.0 * left[0]
        left[0] = slots_of(v, pages, 0)[0].sum()
        return out

    return paged


def flash_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
) -> tuple[Tensor, None]:
    """The documented arguments; a window excludes its left edge no more than the token itself."""
    assert causal
    assert softmax_scale == q.shape[-1] ** -0.5
    left, right = window_size
    assert right == (None if left is None else 0)
    window = None if left is None else left + 1
    assert cu_seqlens_q is not None
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    if page_table is None:
        assert cu_seqlens_k is not None
        return plain_whole(q, k, v, cu_seqlens_q, max_seqlen_q, window), None
    assert cu_seqlens_k is None
    assert seqused_k is not None
    pages = Pages(cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k, page_table, page_table)
    return plain_paged(q, k, v, pages, window), None


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """The documented arguments of PyTorch's; (-1, 0) is causal."""
    assert enable_gqa
    assert window_size[1] == 0
    window = None if window_size[0] < 0 else window_size[0] + 1
    if seqused_k is None:
        assert cu_seq_k is not None
        return plain_whole(query, key, value, cu_seq_q, max_q, window)
    assert block_table is None
    assert cu_seq_k is not None
    assert cu_seq_k.dtype == torch.int32
    places = zip(pairwise(cu_seq_q.tolist()), cu_seq_k.tolist(), seqused_k.tolist(), strict=False)
    return attended(  # contexts one after another, with unused rows behind each
        [(query[a:b], key[first : first + used], value[first : first + used]) for (a, b), first, used in places],
        window,
        query,
    )


flash_4.__name__ = "flash_attn_varlen_func"
