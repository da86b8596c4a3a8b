"""Paged attention of the GPU kernels against float64: head sizes, groups, odd lengths, both directions, windows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu_kernels.paged import contexts
from tests.support.kernel_reference import attention_of_chunk
from tests.support.marks import slow

pytest.importorskip("triton")

from kernels.attention import PLAIN_SCORES, ScoreForm
from kernels.gpu.attention import decode_attention, prefill_attention
from kernels.gpu.attention.decode_attention import TILE, decode_batch, paged_decode
from kernels.gpu.attention.prefill_attention import ChunkBatch, chunk_tiles, paged_prefill, tiling
from kernels.gpu.attention.work_partition import partition, plain_partition
from kernels.gpu.launching import converts_float8, program_shared_bytes

pytestmark = pytest.mark.slow

TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}
HEAD_DIMS = (64, 80, 96, 128)
# Every head size, dtype, and a window or none in the first four; sizes of groups go on in the others.
SEEDS = [*range(4), *slow(*range(4, 12))]


def poisoned(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan"))


def of_heads(form: ScoreForm, count: int) -> ScoreForm:
    return form if form.sinks is None else form._replace(sinks=form.sinks[:count])


def on(device: torch.device, form: ScoreForm) -> ScoreForm:
    return form if form.sinks is None else form._replace(sinks=form.sinks.to(device))


def on_device(arrays: Sequence[Any], device: torch.device) -> list[Tensor]:
    return [torch.from_numpy(array).to(device) for array in arrays]


def check_decode(
    seed: int,
    lengths: list[int],
    window: int | None,
    device: torch.device,
    num_programs: int = 4,
    *,
    is_float8: bool = False,
    is_chunked: bool = False,
    form: ScoreForm = PLAIN_SCORES,
) -> None:
    rng = np.random.default_rng(seed)
    kv_heads, group, head_dim = int(rng.integers(1, 4)), seed % 8 + 1, HEAD_DIMS[seed % 4]
    form = of_heads(form, kv_heads * group)
    dtype = list(TOLERANCES)[seed % 3]
    there = contexts(rng, lengths, (kv_heads, head_dim), int(rng.choice([4, 16])), dtype, device, is_float8=is_float8)
    queries = torch.randn(len(lengths), kv_heads, group, head_dim).to(device, dtype)
    out = poisoned(queries)
    partitioned = partition(there.lengths, tile=TILE, num_programs=num_programs, window=window, is_chunked=is_chunked)
    lengths_there, *arrays = on_device([there.lengths.astype(np.int32), *partitioned], device)
    batch = decode_batch(there.tables, lengths_there, arrays, (kv_heads, group, head_dim))
    paged_decode(queries, out, there.view, batch, window=window, is_chunked=is_chunked, scores=on(device, form))
    for row in range(len(lengths)):
        own = queries[row].reshape(1, -1, head_dim)
        cached = (there.keys[row].cpu(), there.values[row].cpu())
        expected = attention_of_chunk(own.cpu(), *cached, window, form, is_chunked=is_chunked)[0]
        actual = out[row].reshape(-1, head_dim).double().cpu()
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("seed", SEEDS)
def test_decode(seed: int, device: torch.device) -> None:
    rng = np.random.default_rng(seed)
    check_decode(seed, rng.integers(1, 200, 5).tolist(), None if seed % 2 else int(rng.integers(1, 150)), device)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [TILE + 1, 1], *slow([1], [TILE], [3 * TILE, 1, 1, 1, 1])])
def test_decode_at_the_edges_of_tiles(lengths: list[int], device: torch.device) -> None:
    for num_programs in (1, 2, 7):
        check_decode(0, lengths, None, device, num_programs)


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_decode_of_a_long_context_by_many_programs(seed: int, device: torch.device) -> None:
    """More parts than are merged at a time, beside a context that is one part."""
    check_decode(seed, [2000, 3], None, device, num_programs=40)


@pytest.mark.parametrize("window", [TILE, *slow(1, 2, TILE + 1)])
def test_narrow_windows(window: int, device: torch.device) -> None:
    check_decode(2, [1, 130, TILE, 70], window, device)
    check_prefill(2, [1, 130, TILE, 70], [1, 9, TILE, 40], window, device)


def check_prefill(
    seed: int,
    lengths: list[int],
    counts: list[int],
    window: int | None,
    device: torch.device,
    *,
    is_float8: bool = False,
    is_chunked: bool = False,
    form: ScoreForm = PLAIN_SCORES,
    ends: list[int] | None = None,
) -> None:
    """`ends`: behind what the tokens of all chunks read."""
    rng = np.random.default_rng(seed)
    kv_heads, group, head_dim = int(rng.integers(1, 4)), seed % 8 + 1, HEAD_DIMS[seed % 4]
    form = of_heads(form, kv_heads * group)
    dtype = list(TOLERANCES)[seed % 3]
    there = contexts(rng, lengths, (kv_heads, head_dim), int(rng.choice([4, 16])), dtype, device, is_float8=is_float8)
    queries = torch.randn(sum(counts), kv_heads, group, head_dim).to(device, dtype)
    out = poisoned(queries)
    sizes = tiling(head_dim, there.view.blocks.dtype, program_shared_bytes(device))
    tiles = chunk_tiles(there.lengths, np.array(counts), group=group, query_rows=sizes.query_rows)
    later = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device)
    batch = ChunkBatch(there.tables, on_device(tiles, device), later)
    paged_prefill(queries, out, there.view, batch, window=window, is_chunked=is_chunked, scores=on(device, form))
    first = 0
    for row, count in enumerate(counts):
        own = queries[first : first + count].reshape(count, -1, head_dim).cpu()
        cached = (there.keys[row].cpu(), there.values[row].cpu())
        own_ends = None if ends is None else torch.tensor(ends[first : first + count])
        expected = attention_of_chunk(own, *cached, window, form, is_chunked=is_chunked, ends=own_ends)
        actual = out[first : first + count].reshape(count, -1, head_dim).double().cpu()
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=TOLERANCES[dtype])
        first += count


@pytest.mark.parametrize("seed", SEEDS)
def test_prefill(seed: int, device: torch.device) -> None:
    rng = np.random.default_rng(100 + seed)
    lengths = rng.integers(1, 120, 3).tolist()
    counts = [int(rng.integers(1, length + 1)) for length in lengths]
    check_prefill(seed, lengths, counts, None if seed % 2 else int(rng.integers(1, 90)), device)


@pytest.mark.parametrize("window", [None, *slow(193)])
@pytest.mark.parametrize("seed", [0, *slow(*range(1, 6))])
def test_chunks_deep_in_their_contexts(seed: int, window: int | None, device: torch.device) -> None:
    """Tiles of keys that every query sees whole, and those behind them that some do."""
    check_prefill(seed, [300, 193, 129], [20, 150, 1], window, device)


SINKS = torch.linspace(-2.0, 3.0, 24)  # of as many heads as any of these models has


@pytest.mark.parametrize("form", [ScoreForm(SINKS, 1.5), ScoreForm(SINKS), *slow(ScoreForm(cap=1.5))], ids=str)
@pytest.mark.parametrize(("seed", "window"), [(0, None), (1, 70), (2, None), (3, 40)])
def test_sinks_and_capped_scores(form: ScoreForm, seed: int, window: int | None, device: torch.device) -> None:
    """A cap that most scores come near, and sinks that take more than half of some weights."""
    check_decode(seed, [1, 130, TILE, 70], window, device, num_programs=7, form=form)
    check_prefill(seed, [1, 130, TILE, 200], [1, 9, TILE, 150], window, device, form=form)
    check_decode(seed, [1, 130], window, device, form=form, is_float8=True)


@pytest.mark.parametrize(("seed", "window"), [(0, 40), (1, TILE), (2, 1), (3, 128), (5, 1000)])
def test_contexts_cut_at_multiples_of_the_window(seed: int, window: int, device: torch.device) -> None:
    check_decode(seed, [1, 130, TILE, 128, 129], window, device, num_programs=7, is_chunked=True)
    check_prefill(seed, [1, 130, TILE, 200], [1, 9, TILE, 150], window, device, is_chunked=True)


@pytest.mark.parametrize(("seed", "window"), [(0, None), (1, 40), (2, 130)])
def test_tokens_that_read_later_ones(seed: int, window: int | None, device: torch.device) -> None:
    """Of a chunk of 150 behind 50, tokens 70 to 180 read one another; of a short one, the last three."""
    long = [181 if 70 <= at < 181 else at + 1 for at in range(50, 200)]
    short = [at + 1 for at in range(121, 127)] + [130] * 3
    check_prefill(seed, [200, 130], [150, 9], window, device, ends=[*long, *short])


@pytest.mark.parametrize("converts", [True, False])
@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3, 6)])
def test_a_cache_of_float8(seed: int, converts: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head sizes and dtypes by turns, windows, both directions; by GPUs that convert FP8 themselves, and older ones."""
    if converts and not converts_float8(device):
        pytest.skip("this GPU converts no FP8")
    for module in (decode_attention, prefill_attention):
        monkeypatch.setattr(module, "converts_float8", lambda _: converts)
    window = 90 if seed % 2 else None
    check_decode(seed, [1, 130, TILE, 70], window, device, is_float8=True)
    check_prefill(seed, [1, 130, TILE, 200], [1, 9, TILE, 70], window, device, is_float8=True)


@pytest.mark.parametrize("seed", [*range(30), *slow(*range(30, 200))])
def test_a_division_computes_every_tile_once_and_evenly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, num_programs = rng.integers(1, 3000, int(rng.integers(1, 40))), int(rng.integers(1, 60))
    window, is_chunked = int(rng.integers(1, 2000)) if seed % 3 == 0 else None, seed % 2 == 0
    parts, plain = (
        divide(lengths, tile=TILE, num_programs=num_programs, window=window, is_chunked=is_chunked)
        for divide in (partition, plain_partition)
    )
    assert all(np.array_equal(one, other) for one, other in zip(parts, plain, strict=True))
    seen: list[tuple[int, int]] = []
    loads = []
    for program in range(num_programs):
        load = 0
        for part in range(parts.program_parts[program], parts.program_parts[program + 1]):
            row, first, last = (int(array[part]) for array in (parts.part_rows, parts.part_firsts, parts.part_lasts))
            assert first < last
            assert parts.row_parts[row] <= part < parts.row_parts[row + 1]
            seen += [(row, tile) for tile in range(first, last)]
            load += last - first
        loads.append(load)
    firsts = [length - 1 if window is None else (length - 1) % window for length in lengths.tolist()]  # tokens back
    firsts = firsts if is_chunked or window is None else [window - 1] * len(lengths)
    begins = [max(0, length - 1 - first) // TILE for length, first in zip(lengths.tolist(), firsts, strict=True)]
    ends = [-(-length // TILE) for length in lengths.tolist()]
    assert seen == [(row, tile) for row in range(len(lengths)) for tile in range(begins[row], ends[row])]
    assert max(loads) - min(loads) <= 1
    assert len(parts.part_rows) == num_programs + len(lengths) >= parts.num_parts
