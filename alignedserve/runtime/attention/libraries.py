"""Attention of prompts and chunks by installed libraries: flash-attn-4, flash-attn 2 and PyTorch's own.

Each is called by the names of its documented arguments alone. Whether one works here, and is faster than our kernel, is
found out by running it when an engine starts (`prompt_choice`).
"""

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout

OWN = "own kernel"
FLASH_4, FLASH_2, PYTORCH = "flash-attn-4", "flash-attn", "PyTorch"
LIBRARIES = (FLASH_4, FLASH_2, PYTORCH)
_DTYPES = ("float16", "bfloat16")

# Of paged caches in flash-attn 2, which is PyTorch's too.
_PAGE_TOKENS = 256


class Pages(NamedTuple):
    """Contexts in blocks, and the places of the chunks that end them; all but the numbers are on the device."""

    starts: Tensor  # [contexts + 1] int32: the first query row of each chunk, and the end
    lengths: Tensor  # [contexts] int32: tokens of each context, its chunk's included
    table: Tensor  # [contexts, most blocks] int32: blocks of each, then any
    longest_chunk: int
    longest_context: int


# Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim] of prompts one after another, the
# first row of each (and their end), the longest, the window -> as the queries.
WholePrompts = Callable[[Tensor, Tensor, Tensor, Tensor, int, int | None], Tensor]
# Queries as above, keys and values of one layer [blocks, block_size, kv_heads, head_dim], the window -> as the queries.
PagedChunks = Callable[[Tensor, Tensor, Tensor, Pages, int | None], Tensor]


class AttentionLibrary(NamedTuple):
    """The kernels of one library."""

    name: str
    whole: WholePrompts
    paged: PagedChunks | None  # None: it reads no blocks of this size


def installed_libraries(layout: BlockLayout, device: torch.device) -> list[AttentionLibrary]:
    """Return the libraries for blocks like these that can be imported here; whether their kernels run is not known."""
    if device.type != "cuda" or layout.dtype not in _DTYPES:
        return []
    has_pages = layout.block_size % _PAGE_TOKENS == 0
    found: list[AttentionLibrary] = []
    flash_4 = _function("flash_attn.cute", "flash_attn_varlen_func")
    if flash_4 is not None:
        found.append(_flash_4(flash_4))
    flash_2 = _function("flash_attn", "flash_attn_varlen_func")
    if flash_2 is not None:
        found.append(_flash_2(flash_2, has_pages))
    varlen = _function("torch.nn.attention.varlen", "varlen_attn")
    if varlen is not None:
        found.append(_pytorch(varlen, has_pages))
    return found


def _function(module: str, name: str) -> Callable[..., Any] | None:
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError):  # not installed, or built for another PyTorch or CUDA
        return None
    return function


def _scale(queries: Tensor) -> float:
    return 1.0 / math.sqrt(queries.shape[-1])


def _flash_4(varlen: Callable[..., Any]) -> AttentionLibrary:
    """Return flash-attn-4, which takes pages of any size and returns sums of weights beside its output."""

    def common(queries: Tensor, window: int | None) -> dict[str, Any]:
        left = None if window is None else window - 1
        return {
            "softmax_scale": _scale(queries),
            "causal": True,
            "window_size": (left, 0 if left is not None else None),
        }

    def whole(
        queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int, window: int | None
    ) -> Tensor:
        places = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return _output(varlen(queries, keys, values, **places, **common(queries, window)))

    def paged(queries: Tensor, keys: Tensor, values: Tensor, pages: Pages, window: int | None) -> Tensor:
        places = {
            "cu_seqlens_q": pages.starts,
            "seqused_k": pages.lengths,
            "page_table": pages.table,
            "max_seqlen_q": pages.longest_chunk,
            "max_seqlen_k": pages.longest_context,
        }
        return _output(varlen(queries, keys, values, **places, **common(queries, window)))

    return AttentionLibrary(FLASH_4, whole, paged)


def _flash_2(varlen: Callable[..., Any], has_pages: bool) -> AttentionLibrary:
    def common(queries: Tensor, window: int | None) -> dict[str, Any]:
        own_window = (-1, -1) if window is None else (window - 1, 0)
        return {"softmax_scale": _scale(queries), "causal": True, "window_size": own_window}

    def whole(
        queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int, window: int | None
    ) -> Tensor:
        places = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return _output(varlen(queries, keys, values, **places, **common(queries, window)))

    def paged(queries: Tensor, keys: Tensor, values: Tensor, pages: Pages, window: int | None) -> Tensor:
        ends = torch.cumsum(pages.lengths, 0, dtype=torch.int32)
        places = {
            "cu_seqlens_q": pages.starts,
            "cu_seqlens_k": torch.nn.functional.pad(ends, (1, 0)),
            "block_table": pages.table,
            "max_seqlen_q": pages.longest_chunk,
            "max_seqlen_k": pages.longest_context,
        }
        return _output(varlen(queries, keys, values, **places, **common(queries, window)))

    return AttentionLibrary(FLASH_2, whole, paged if has_pages else None)


def _pytorch(varlen: Callable[..., Any], has_pages: bool) -> AttentionLibrary:
    def common(queries: Tensor, window: int | None) -> dict[str, Any]:
        left = -1 if window is None else window - 1
        return {"scale": _scale(queries), "window_size": (left, 0), "enable_gqa": True}

    def whole(
        queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int, window: int | None
    ) -> Tensor:
        return _output(varlen(queries, keys, values, starts, starts, longest, longest, **common(queries, window)))

    def paged(queries: Tensor, keys: Tensor, values: Tensor, pages: Pages, window: int | None) -> Tensor:
        longest = (pages.longest_chunk, pages.longest_context)
        contexts = {"seqused_k": pages.lengths, "block_table": pages.table}
        return _output(
            varlen(queries, keys, values, pages.starts, None, *longest, **contexts, **common(queries, window))
        )

    return AttentionLibrary(PYTORCH, whole, paged if has_pages else None)


def _output(returned: Tensor | tuple[Tensor, ...]) -> Tensor:
    return returned if isinstance(returned, Tensor) else returned[0]
