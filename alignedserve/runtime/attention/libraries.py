"""Attention of prompts and chunks by libraries: PyTorch's own kernels, and flash-attn-4 where it is installed.

Each is called by the names of its documented arguments alone. Whether one works here, and is faster than our kernel, is
found out by a process of its own when an engine starts (`library_trial`, `prompt_choice`).
"""

import functools
import importlib
import inspect
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout

logger = logging.getLogger(__name__)

OWN = "own kernel"
FLASH_4, PYTORCH = "flash-attn-4", "PyTorch"
LIBRARIES = (FLASH_4, PYTORCH)
_DTYPES = ("float16", "bfloat16")

# Arguments by which PyTorch's function is called, and the first version that has them all.
_PYTORCH_ARGUMENTS = frozenset({"scale", "window_size", "enable_gqa", "seqused_k", "block_table"})
_FIRST_PYTORCH = "2.12"

# Of the pages that PyTorch's kernel reads in place.
_PAGE_TOKENS = 256


class Pages(NamedTuple):
    """Contexts in blocks, and the places of the chunks that end them; all but the numbers are on the device."""

    starts: Tensor  # [contexts + 1] int32: the first query row of each chunk, and the end
    lengths: Tensor  # [contexts] int32: tokens of each context, its chunk's included
    table: Tensor  # [contexts, most blocks] int32: blocks of each, then any
    longest_chunk: int
    longest_context: int
    blocks: Tensor  # [blocks of all contexts] int64: those of each, one context after another
    firsts: Tensor  # [contexts + 1] int32: the slot of each context's first token within these blocks, and the end


# Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim] of prompts one after another, the
# first row of each (and their end), the longest, the window -> as the queries.
WholePrompts = Callable[[Tensor, Tensor, Tensor, Tensor, int, int | None], Tensor]
# Queries as above, keys and values of one layer [blocks, block_size, kv_heads, head_dim], the window -> as the queries.
PagedChunks = Callable[[Tensor, Tensor, Tensor, Pages, int | None], Tensor]


class AttentionLibrary(NamedTuple):
    """The kernels of one library."""

    name: str
    whole: WholePrompts
    paged: PagedChunks
    gathers: bool = False  # chunks' contexts are copied first: its pages have another size


def installed_libraries(layout: BlockLayout, device: torch.device) -> list[AttentionLibrary]:
    """Return the libraries for blocks like these that can be imported here; whether their kernels run is not known."""
    if device.type != "cuda" or layout.dtype not in _DTYPES:
        return []
    found = (library_named(name, layout.block_size) for name in LIBRARIES)
    return [library for library in found if library is not None]


def library_named(name: str, block_size: int) -> AttentionLibrary | None:
    """Return one of LIBRARIES for blocks of this size; None: it is not here, or too old, which the log says."""
    module, function, build = _SOURCES[name]
    varlen = _function(module, function)
    if varlen is None:
        return None
    if name == PYTORCH and _PYTORCH_ARGUMENTS - inspect.signature(varlen).parameters.keys():
        _say_too_old(torch.__version__)
        return None
    return build(varlen, block_size)


@functools.cache  # once per process
def _say_too_old(version: str) -> None:
    known = version.split("+")[0]
    logger.warning("PyTorch %s computes no prompts and no chunks here, it is too old: %s does", known, _FIRST_PYTORCH)


def _function(module: str, name: str) -> Callable[..., Any] | None:
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError):  # not installed, or built for another PyTorch or CUDA
        return None
    return function


def _scale(queries: Tensor) -> float:
    return 1.0 / math.sqrt(queries.shape[-1])


def _flash_4(varlen: Callable[..., Any], _block_size: int) -> AttentionLibrary:
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


def _pytorch(varlen: Callable[..., Any], block_size: int) -> AttentionLibrary:
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

    def gathered(queries: Tensor, keys: Tensor, values: Tensor, pages: Pages, window: int | None) -> Tensor:
        own = (cache.index_select(0, pages.blocks).flatten(0, 1) for cache in (keys, values))
        places = (pages.starts, pages.firsts, pages.longest_chunk, pages.longest_context)
        return _output(varlen(queries, *own, *places, seqused_k=pages.lengths, **common(queries, window)))

    has_pages = block_size % _PAGE_TOKENS == 0
    return AttentionLibrary(PYTORCH, whole, paged if has_pages else gathered, gathers=not has_pages)


def _output(returned: Tensor | tuple[Tensor, ...]) -> Tensor:
    return returned if isinstance(returned, Tensor) else returned[0]


_SOURCES: dict[str, tuple[str, str, Callable[[Callable[..., Any], int], AttentionLibrary]]] = {
    FLASH_4: ("flash_attn.cute", "flash_attn_varlen_func", _flash_4),
    PYTORCH: ("torch.nn.attention.varlen", "varlen_attn", _pytorch),
}
