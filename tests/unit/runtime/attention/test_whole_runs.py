"""Runs of tokens that read one another both ways: by the native kernels and in PyTorch, against the plain reference."""

import numpy as np
import pytest
import torch

from alignedserve.core.picture import settled_len
from alignedserve.runtime.attention.sequence_table import ends_of
from kernels.cpu.native import supported_levels
from kernels.cpu.paged_attention import PagedAttention
from tests.support.kernel_reference import attention
from tests.unit.runtime.attention.test_native_backend import LAYER, make_batch

RUNS = ((15, 40), (300, 256), (660, 1))


def test_ends_are_those_of_runs() -> None:
    ends = ends_of({7: ((3, 4), (9, 2))}, np.array([2, 7]), np.array([5, 1]), np.array([2, 12]))
    assert ends is not None
    assert ends.tolist() == [6, 7, 2, 3, 7, 7, 7, 7, 8, 9, 11, 11, 12, 13]
    assert ends_of({7: ((3, 4),)}, np.array([2]), np.array([5]), np.array([2])) is None
    assert [settled_len(((4, 6),), count) for count in (3, 4, 5, 9, 10, 11)] == [3, 4, 4, 4, 10, 11]


@pytest.mark.parametrize("level", supported_levels())
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_native_kernels_read_runs_both_ways(num_threads: int, window: int | None, level: str) -> None:
    lengths, counts = np.array([70, 700]), np.array([8, 690])
    batch = make_batch((2, 40), 16, torch.float32, lengths)
    queries = torch.randn(int(counts.sum()), 2, 3, 40, generator=torch.Generator().manual_seed(1))
    attended = torch.empty_like(queries)
    kernel = PagedAttention(batch.blocks, group=3, level=level)
    ends = ends_of({1: RUNS}, np.array([0, 1]), lengths - counts, counts)
    assert ends is not None
    args = (batch.tables, batch.rows, lengths, counts, window, num_threads)
    kernel.run(kernel.plan_chunks(*args, ends=ends), queries, attended, LAYER, True)
    row = 0
    for (keys, values), length, count in zip(batch.contexts, lengths.tolist(), counts.tolist(), strict=True):
        for position in range(length - count, length):
            first = 0 if window is None else max(0, position - window + 1)
            part = slice(first, int(ends[row]))
            expected = attention(queries[row].flatten(0, 1), keys[part], values[part])
            assert float((attended[row].flatten(0, 1).double() - expected).abs().max()) < 3e-6, (position, length)
            row += 1
    for wrong in (ends[:-1], ends - 1, ends + 700):
        with pytest.raises(ValueError, match="end"):
            kernel.plan_chunks(*args, ends=wrong)
