"""Decode attention that is not divided computes what the divided one does."""

import numpy as np
import pytest
import torch

from tests.gpu_kernels.paged import contexts

pytest.importorskip("triton")

from alignedserve.microbench.kernels.naive_decode import naive_batch, unpartitioned
from kernels.gpu.decode_attention import TILE, decode_batch, paged_decode
from kernels.gpu.work_partition import partition

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("window", [None, 70])
def test_it_computes_what_the_divided_one_does(window: int | None, device: torch.device) -> None:
    lengths, heads = [1, TILE, 3 * TILE + 5], (2, 3, 80)
    there = contexts(np.random.default_rng(0), lengths, (2, 80), 16, torch.float32, device)
    queries = torch.randn(3, *heads, generator=torch.Generator().manual_seed(0)).to(device)
    naive, divided = (torch.full_like(queries, float("nan")) for _ in range(2))
    paged_decode(
        queries, naive, there.view, naive_batch(there.tables, there.lengths, heads, window=window), window=window
    )
    partitioned = partition(there.lengths, tile=TILE, num_programs=5, window=window)
    arrays = [torch.from_numpy(array).to(device) for array in (there.lengths.astype(np.int32), *partitioned)]
    batch = decode_batch(there.tables, arrays[0], arrays[1:], heads)
    paged_decode(queries, divided, there.view, batch, window=window)
    torch.testing.assert_close(naive, divided, rtol=0.0, atol=5e-6)


def test_a_context_is_one_part_and_has_one_program() -> None:
    partitioned = unpartitioned(np.array([1, TILE + 1, 10 * TILE]), window=TILE)
    assert partitioned.num_parts == 3
    assert partitioned.part_rows.tolist() == [0, 1, 2]
    assert partitioned.part_firsts.tolist() == [0, 0, 9]
    assert partitioned.part_lasts.tolist() == [1, 2, 10]
    assert partitioned.program_parts.tolist() == [0, 1, 2, 3]
