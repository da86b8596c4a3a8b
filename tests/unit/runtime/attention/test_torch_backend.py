"""Attention kernels against the plain reference."""

import torch
from torch import Tensor

from alignedserve.runtime.attention.torch_backend import bucket_bounds
from kernels.attention import GatherBuffers, RunSelection, attend_decode
from tests.support.kernel_reference import attention
from tests.support.marks import each

BLOCK_SIZE, HEAD_DIM = 4, 16
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random_runs(num_blocks: int, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_blocks + kv_heads)
    shape = (num_blocks, BLOCK_SIZE * kv_heads * HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return keys, values


@each("dtype", list(TOLERANCES))
@each("group", [1, 3, 8])
def test_decode_with_grouped_heads_and_odd_lengths(group: int, dtype: torch.dtype) -> None:
    kv_heads, lengths, width = 2, [1, 9, 11, 12, 7], 3
    keys, values = random_runs(20, kv_heads, dtype)
    run_ids = torch.randperm(20, generator=torch.Generator().manual_seed(group))[: len(lengths) * width]
    queries = torch.randn(len(lengths), kv_heads, group, HEAD_DIM).to(dtype)
    mask = torch.zeros(len(lengths), 1, 1, width * BLOCK_SIZE)
    for row, length in enumerate(lengths):
        mask[row, :, :, length:] = float("-inf")
    buffers = GatherBuffers(torch.device("cpu"))
    attended = attend_decode(queries, keys, values, RunSelection(run_ids), mask, buffers)
    assert attended.dtype == dtype
    for row, length in enumerate(lengths):
        runs = run_ids[row * width : (row + 1) * width]
        expected = attention(queries[row].flatten(0, 1), *context(keys, values, runs, kv_heads, length))
        torch.testing.assert_close(attended[row].flatten(0, 1).double(), expected, rtol=0.0, atol=TOLERANCES[dtype])


def context(keys: Tensor, values: Tensor, runs: Tensor, kv_heads: int, length: int) -> tuple[Tensor, Tensor]:
    shape = (-1, kv_heads, HEAD_DIM)
    return keys[runs].view(shape)[:length], values[runs].view(shape)[:length]


def test_buckets_bound_the_padding() -> None:
    blocks = sorted([1, 1, 2, 3, 5, 8, 8, 9, 40, 41, 44, 100, 101, 101, 101, 101, 101, 130])
    bounds = bucket_bounds(blocks, max_blocks=200)
    assert [first for first, _ in bounds[1:]] == [last for _, last in bounds[:-1]]
    assert (bounds[0][0], bounds[-1][1]) == (0, len(blocks))
    for first, last in bounds:
        assert blocks[last - 1] <= blocks[first] * 1.25 + 1
        assert last - first <= 4 or (last - first) * blocks[last - 1] <= 200


def test_no_buckets_without_sequences() -> None:
    assert bucket_bounds([], max_blocks=10) == []
