"""Attention straight from blocks, by the native kernels: nothing is gathered, padded or masked, and no slot outside a
context is read.

Decode: one query token per sequence. The contexts of a batch are cut into pieces of about equal length, which cores
take one after another; a context that is cut has its parts merged. A piece runs once through its keys and values, all
heads at a time (they lie side by side), keeping a running maximum and sum per query head.

What comes later enters here: a direction table is a second way from a token to its slot (the piece's offsets are
computed in one place); a hidden-cache block a product with the layer's key and value weights before its tokens are
scored. A cache of int8 came in as another way to load a unit of elements."""

import math
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention import PLAIN_SCORES, ScoreForm
from kernels.cache_rows import SCALE_BYTES, int8_row_width
from kernels.cpu.native import load_native

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Instruction sets that kernels are compiled for, best first.
LEVELS = ("amx", "avx512bf16", "avx2", "plain")


class PagedPlan(Protocol):
    """A division of one batch's contexts over cores, valid for every layer of one step."""

    num_rows: int

    def run(self, layer: int, is_windowed: bool, queries: int, query_stride: int, out: int, out_stride: int, /) -> None:
        """Run on addresses and row strides (in elements) of [rows, num_heads, head_dim] tensors."""


_native = load_native("BlockCache")


class Int8Heads(NamedTuple):
    """Layout of the rows of a cache of int8."""

    kv_heads: int
    dtype: torch.dtype  # of queries and results


class PagedAttention:
    """Attention over the blocks of a storage; reads only."""

    def __init__(
        self, blocks: Tensor, *, group: int, level: str, int8: Int8Heads | None = None, scores: ScoreForm = PLAIN_SCORES
    ) -> None:
        """`blocks` [num_blocks, num_layers, 2 (keys, values), block_size, kv_heads, head_dim], contiguous, on the CPU,
        float32 or bfloat16, or with `int8` [.., block_size, row_width] (`caches.int8_rows`); with 1 in place of 2 the
        values are the keys. `group` query heads read one key head."""
        assert _native is not None, "the native kernels are not built"
        assert blocks.device.type == "cpu", "native attention runs on the CPU"
        assert blocks[0].is_contiguous(), "a block is one run of memory"
        kv_heads, head_dim = blocks.shape[-2:]
        self._dtype = blocks.dtype
        if int8 is not None:
            kv_heads, self._dtype = int8
            head_dim = blocks.shape[-1] // kv_heads - SCALE_BYTES
            assert blocks.dtype == torch.int8, f"not a cache of int8: {blocks.dtype}"
            assert blocks.shape[-1] == int8_row_width(kv_heads, head_dim), f"not rows of {kv_heads} heads"
        assert self._dtype in (torch.float32, torch.bfloat16), f"no native attention for {self._dtype}"
        num_blocks, num_layers, num_parts, block_size = blocks.shape[:4]
        self._blocks = blocks
        self._row_shape = (kv_heads, group, head_dim)
        sizes = (num_blocks, num_layers, block_size, kv_heads, group, head_dim)
        kinds = (self._dtype == torch.bfloat16, int8 is not None)
        block_bytes = blocks.stride(0) * blocks.element_size()
        self._sinks = None  # as exponents of two
        if scores.sinks is not None:
            assert scores.sinks.shape == (num_layers, kv_heads * group), f"not one sink a head: {scores.sinks.shape}"
            self._sinks = (scores.sinks.to("cpu", torch.float64) * math.log2(math.e)).float().contiguous()
        sinks = 0 if self._sinks is None else self._sinks.data_ptr()
        own = (block_bytes, num_parts, sinks, scores.cap or 0.0)
        self._cache = _native.BlockCache(level, blocks.data_ptr(), *sizes, *kinds, *own)

    def plan_decode(
        self,
        block_tables: Int64Array,
        rows: Int64Array,
        lengths: Int64Array,
        window: int | None,
        num_threads: int,
        *,
        is_reversed: BoolArray | None = None,
        is_chunked: bool = False,
    ) -> PagedPlan:
        """Divide the work of one step: sequence i reads the first lengths[i] tokens of row rows[i] of `block_tables`
        (the last `window` of them in windowed layers, or with `is_chunked` those from the last multiple of it on),
        which must stay unchanged until the step ends. `is_reversed` [sequences]: token i of a block lies in slot
        block_size - 1 - i; None: of none."""
        directions = np.zeros(len(rows), np.bool_) if is_reversed is None else is_reversed
        args = (block_tables, rows, directions, lengths, window or 0, is_chunked, num_threads)
        plan: PagedPlan = _native.DecodePlan(self._cache, *args)
        return plan

    def plan_chunks(
        self,
        block_tables: Int64Array,
        rows: Int64Array,
        lengths: Int64Array,
        counts: Int64Array,
        window: int | None,
        num_threads: int,
        *,
        is_reversed: BoolArray | None = None,
        is_bidirectional: bool = False,
        is_chunked: bool = False,
        ends: Int64Array | None = None,
    ) -> PagedPlan:
        """Divide the work of chunks likewise: the last counts[i] of the first lengths[i] tokens of sequence i each read
        up to themselves, or with `is_bidirectional`, which excludes a window, all lengths[i]. The token rows of a chunk
        follow those of the one before. `ends` [token rows]: of what each token reads, itself or a later token of its
        chunk included; a window reaches back from the token itself. None: each reads up to itself."""
        directions = np.zeros(len(rows), np.bool_) if is_reversed is None else is_reversed
        args = (block_tables, rows, directions, lengths, counts, window or 0, is_chunked, num_threads)
        own_ends = () if ends is None else (ends,)
        plan: PagedPlan = _native.ChunkPlan(self._cache, *args, is_bidirectional, *own_ends)
        return plan

    def run(self, plan: PagedPlan, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        """Fill `out` from queries, both [tokens, kv_heads, group, head_dim], dtype of the blocks (or of `int8`), rows
        possibly strided. The keys and values of all tokens are in the blocks."""
        self._check(queries, plan.num_rows)
        self._check(out, plan.num_rows)
        plan.run(layer, is_windowed, queries.data_ptr(), queries.stride(0), out.data_ptr(), out.stride(0))

    def _check(self, rows: Tensor, num_rows: int) -> None:
        _, group, head_dim = self._row_shape
        assert rows.shape == (num_rows, *self._row_shape), f"not [{num_rows}, {self._row_shape}]: {rows.shape}"
        assert rows.stride()[1:] == (group * head_dim, head_dim, 1), "the heads of a row are contiguous"
        assert rows.dtype == self._dtype, "one dtype for blocks, queries and results"
        assert rows.device.type == "cpu", "native attention runs on the CPU"
