"""Latent attention of the GPU kernels against float64: rows that are keys and values, many heads, both directions."""

import numpy as np
import pytest
import torch

from tests.gpu_kernels.paged import contexts
from tests.gpu_kernels.test_attention import TOLERANCES, on_device, poisoned
from tests.support.kernel_reference import attention_of_chunk
from tests.support.marks import slow

pytest.importorskip("triton")

from kernels.gpu.attention.decode_attention import decode_batch
from kernels.gpu.attention.latent_attention import LatentTiling, latent_decode, latent_prefill, tiling_of
from kernels.gpu.attention.prefill_attention import ChunkBatch, chunk_tiles
from kernels.gpu.attention.work_partition import partition

pytestmark = pytest.mark.slow

SIZES = ((24, 16), (72, 64), (48, 40), *((576, 512),) * 3)  # elements of a row, and of its latent
HEADS = (2, 20, 5, 16, 64, 128)
SEEDS = [0, 1, *slow(*range(2, 9))]


@pytest.mark.parametrize("is_float8", [False, *slow(True)])
@pytest.mark.parametrize("seed", SEEDS)
def test_decodes_and_chunks(seed: int, is_float8: bool, device: torch.device) -> None:
    """Each token over the rows up to its own; heads by parts where a program has fewer rows."""
    rng = np.random.default_rng(seed)
    (width, rank), num_heads = SIZES[seed % 6], HEADS[seed % 6]
    dtype = list(TOLERANCES)[seed % 3]
    lengths, counts = [1, 130, 64, 77], np.array([1, 9, 64, 40])
    there = contexts(rng, lengths, (1, width), 16, dtype, device, is_float8=is_float8, is_shared=True)
    sizes = tiling_of(there.view)
    if seed == 1:  # two programs for the heads of a token
        sizes = LatentTiling(16, 16, 4, 2)
    queries = torch.randn(int(counts.sum()), 1, num_heads, width).to(device, dtype)

    last = np.cumsum(counts) - 1
    decoding = queries[torch.from_numpy(last)]
    decoded = poisoned(decoding)
    partitioned = partition(there.lengths, tile=sizes.tokens, num_programs=7)
    lengths_there, *arrays = on_device([there.lengths.astype(np.int32), *partitioned], device)
    batch = decode_batch(there.tables, lengths_there, arrays, (1, num_heads, rank))
    latent_decode(decoding, decoded, there.view, batch, rank=rank, tiling=sizes)

    out = poisoned(queries)
    tiles = chunk_tiles(there.lengths, counts, group=sizes.heads(num_heads), query_rows=sizes.query_rows)
    latent_prefill(
        queries, out, there.view, ChunkBatch(there.tables, on_device(tiles, device)), rank=rank, tiling=sizes
    )

    for row, (end, count) in enumerate(zip(last.tolist(), counts.tolist(), strict=True)):
        rows, own = there.keys[row].cpu(), slice(end + 1 - count, end + 1)
        expected = attention_of_chunk(queries[own, 0].cpu(), rows, rows, None)[..., -rank:]
        for actual, wanted in ((out[own, 0], expected), (decoded[row : row + 1, 0], expected[-1:])):
            actual = actual[..., -rank:].double().cpu()
            torch.testing.assert_close(actual, wanted, rtol=0.0, atol=TOLERANCES[dtype])
