"""Native attention gives the same bits for a token whether it is decoded or in any chunk, on any number of threads."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cache_rows import quantise_rows
from kernels.cpu.native import supported_levels
from kernels.cpu.paged_attention import Int8Heads, PagedAttention
from tests.support.marks import slow

levels = pytest.mark.parametrize("level", supported_levels() or [pytest.param("", marks=pytest.mark.skip("not built"))])
NUM_SHAPES, NUM_SLOW_SHAPES = 8, 60
HEAD_DIMS = (64, 64, 128, 80, 7, 96, 33, 520)  # wider than 512: caches of int8 take a path of their own
GROUPS = (1, 1, 2, 3, 5, 7, 8, 17)  # a tile of AMX has 16 heads
BLOCK_SIZES = (1, 5, 16, 64, 100)


class Sequence(NamedTuple):
    """One sequence, and how its tokens attend."""

    kernel: PagedAttention
    table: Any
    queries: Tensor
    window: int | None
    is_reversed: bool

    def chunk(self, first: int, last: int, num_threads: int) -> Tensor:
        out = torch.empty_like(self.queries[first:last])
        lengths, counts, rows = np.array([last]), np.array([last - first]), np.array([0])
        directions = np.array([self.is_reversed])
        args = (self.table, rows, lengths, counts, self.window, num_threads)
        plan = self.kernel.plan_chunks(*args, is_reversed=directions)
        self.kernel.run(plan, self.queries[first:last], out, 0, is_windowed=True)
        return out

    def decodes(self, positions: Any, num_threads: int) -> Tensor:
        queries = self.queries[torch.from_numpy(positions)].contiguous()
        out = torch.empty_like(queries)
        count = len(positions)
        args = (np.repeat(self.table, count, 0), np.arange(count), positions + 1, self.window, num_threads)
        plan = self.kernel.plan_decode(*args, is_reversed=np.full(count, self.is_reversed))
        self.kernel.run(plan, queries, out, 0, is_windowed=True)
        return out


def make_sequence(draw: Any, dtype: torch.dtype, is_int8: bool, level: str) -> Sequence:
    """Make a sequence of random shape and content; every second one is longer than a section."""
    heads, group = int(draw(1, 4)), GROUPS[draw(len(GROUPS))]
    head_dim, block_size = HEAD_DIMS[draw(len(HEAD_DIMS))], BLOCK_SIZES[draw(len(BLOCK_SIZES))]
    length = int(draw(1, 300) if draw(2) else draw(500, 1200))
    width = -(-length // block_size)
    content = torch.randn(width, 1, 2, block_size, heads, head_dim, generator=torch.Generator().manual_seed(length))
    queries = torch.randn(length, heads, group, head_dim, generator=torch.Generator().manual_seed(width)).to(dtype)
    blocks = content.to(dtype)
    if is_int8:
        blocks = quantise_rows(content.view(-1, heads, head_dim)).view(width, 1, 2, block_size, -1)
    kernel = PagedAttention(blocks, group=group, level=level, int8=Int8Heads(heads, dtype) if is_int8 else None)
    table = draw(0, 1 << 30, (1, width)).argsort()
    return Sequence(kernel, table, queries, None if draw(2) else int(draw(1, 700)), bool(draw(2)))


@levels
@pytest.mark.parametrize("is_int8", [False, True], ids=["exact", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_shapes", [NUM_SHAPES, *slow(NUM_SLOW_SHAPES)])
def test_cuts_and_threads_change_no_bit(num_shapes: int, dtype: torch.dtype, is_int8: bool, level: str) -> None:
    draw = np.random.default_rng(num_shapes).integers
    for _ in range(num_shapes):
        sequence = make_sequence(draw, dtype, is_int8, level)
        length = len(sequence.queries)
        whole = sequence.chunk(0, length, 1)
        cuts = [0, *sorted(set(draw(1, length, 3).tolist()) if length > 1 else []), length]
        parts = [sequence.chunk(first, last, int(draw(1, 4))) for first, last in pairwise(cuts)]
        assert torch.equal(whole, torch.cat(parts)), f"{cuts}"
        positions = draw(0, length, 6)
        decoded = sequence.decodes(positions, int(draw(1, 5)))
        assert torch.equal(whole[torch.from_numpy(positions)], decoded), f"{positions} of {length}"
