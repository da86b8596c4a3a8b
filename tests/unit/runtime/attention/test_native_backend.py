"""Native attention, every level of it that runs here, against the plain reference. Skipped where it is not built."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.attention.backend import AUTO, TORCH, TRITON, attention_level
from kernels.attention import ScoreForm
from kernels.cpu import native
from kernels.cpu.native import supported_levels
from kernels.cpu.paged_attention import Int64Array, PagedAttention
from kernels.gpu_dispatch import gpu_kernels_available
from tests.support.kernel_reference import attention, attention_of_chunk
from tests.support.marks import slow

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
LENGTHS = np.array([1, 3, 33, 100, 2000, 4, 31, 32, 64])
LAYER = 1

levels = pytest.mark.parametrize("level", supported_levels() or [pytest.param("", marks=pytest.mark.skip("not built"))])
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES))
head_dims = pytest.mark.parametrize("head_dim", [64, 80, 7, *slow(96, 128, 24, 40)])
groups = pytest.mark.parametrize("group", [1, 3, 8, *slow(2, 4, 5, 6, 7)])


class Batch(NamedTuple):
    blocks: Tensor  # NaN in every slot that no sequence uses
    tables: Int64Array
    rows: Int64Array
    contexts: list[tuple[Tensor, Tensor]]  # keys, values [length, kv_heads, head_dim]


def make_batch(shape: tuple[int, int], block_size: int, dtype: torch.dtype, lengths: Int64Array = LENGTHS) -> Batch:
    """Make sequences of random content in shuffled blocks; unused table entries lie outside the storage."""
    generator = torch.Generator().manual_seed(sum(shape) + block_size)
    widths = -(-lengths // block_size)
    blocks = torch.full((int(widths.sum()) + 3, 2, 2, block_size, *shape), float("nan")).to(dtype)
    free = torch.randperm(len(blocks), generator=generator).tolist()
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)].numpy()
    tables = np.full((len(lengths) + 2, int(widths.max()) + 1), -1, np.int64)
    contexts = []
    for row, length, width in zip(rows, lengths.tolist(), widths.tolist(), strict=True):
        ids = tables[row, :width] = [free.pop() for _ in range(width)]
        content = torch.randn(2, length, *shape, generator=generator).to(dtype)
        slots = blocks[torch.tensor(ids), LAYER].transpose(0, 1).reshape(2, -1, *shape)
        slots[:, :length] = content
        blocks[torch.tensor(ids), LAYER] = slots.view(2, width, block_size, *shape).transpose(0, 1)
        contexts.append((content[0], content[1]))
    return Batch(blocks, tables, rows, contexts)


def check_decode(
    batch: Batch,
    group: int,
    level: str,
    window: int | None = None,
    num_threads: int = 2,
    tolerances: dict[torch.dtype, float] = TOLERANCES,
) -> None:
    dtype, (kv_heads, head_dim) = batch.blocks.dtype, batch.blocks.shape[-2:]
    lengths = np.array([len(keys) for keys, _ in batch.contexts])
    # Rows of a wider tensor, as the product of all three projections gives them.
    generator = torch.Generator().manual_seed(group)
    queries = torch.randn(len(lengths), 2 * kv_heads, group, head_dim, generator=generator).to(dtype)[:, :kv_heads]
    attended = torch.full(queries.shape, float("nan"), dtype=dtype)
    kernel = PagedAttention(batch.blocks, group=group, level=level)
    plan = kernel.plan_decode(batch.tables, batch.rows, lengths, window, num_threads)
    kernel.run(plan, queries, attended, LAYER, is_windowed=True)
    for index, (keys, values) in enumerate(batch.contexts):
        first = max(0, len(keys) - window) if window is not None else 0
        expected = attention(queries[index].flatten(0, 1), keys[first:], values[first:])
        difference = attended[index].flatten(0, 1).double() - expected
        assert float(difference.abs().max()) < tolerances[dtype], f"length {len(keys)}"


def check_chunks(
    batch: Batch, counts: list[int], group: int, level: str, window: int | None = None, num_threads: int = 2
) -> None:
    """Check the last counts[i] tokens of each context against one decode after another."""
    dtype, (kv_heads, head_dim) = batch.blocks.dtype, batch.blocks.shape[-2:]
    lengths = np.array([len(keys) for keys, _ in batch.contexts])
    generator = torch.Generator().manual_seed(group)
    queries = torch.randn(sum(counts), 2 * kv_heads, group, head_dim, generator=generator).to(dtype)[:, :kv_heads]
    attended = torch.full((sum(counts) + 1, kv_heads, group, head_dim), float("nan"), dtype=dtype)
    kernel = PagedAttention(batch.blocks, group=group, level=level)
    plan = kernel.plan_chunks(batch.tables, batch.rows, lengths, np.array(counts), window, num_threads)
    kernel.run(plan, queries, attended[:-1], LAYER, is_windowed=True)
    assert attended[-1].isnan().all(), "a row beyond the last chunk was written"
    at = 0
    for (keys, values), count in zip(batch.contexts, counts, strict=True):
        expected = attention_of_chunk(queries[at : at + count].flatten(1, 2), keys, values, window)
        difference = attended[at : at + count].flatten(1, 2).double() - expected
        assert float(difference.abs().max()) < TOLERANCES[dtype], f"{count} of {len(keys)}"
        at += count


@levels
@dtypes
def test_chunks_of_random_shapes(dtype: torch.dtype, level: str) -> None:
    draw = np.random.default_rng(7).integers
    for _ in range(6):
        lengths = draw(1, 400, size=3)
        counts = [int(draw(1, length + 1)) for length in lengths]
        shape = (int(draw(1, 4)), int(draw(4, 140)))
        batch = make_batch(shape, int(draw(1, 70)), dtype, lengths)
        check_chunks(batch, counts, int(draw(1, 6)), level, int(draw(1, 300)), num_threads=int(draw(1, 4)))


@levels
@dtypes
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("num_parts", [2, 1])
def test_sinks_caps_and_values_that_are_keys(
    num_parts: int, has_sinks: bool, cap: float | None, dtype: torch.dtype, level: str
) -> None:
    """Decodes and chunks, of contexts with one section and with several."""
    kv_heads, group, head_dim, window = 2, 3, 40, 77
    batch = make_batch((kv_heads, head_dim), 16, dtype, np.array([1, 70, 1300]))
    blocks = batch.blocks[:, :, :num_parts].contiguous()
    sinks = torch.randn(2, kv_heads * group, generator=torch.Generator().manual_seed(1)) * 3 if has_sinks else None
    kernel = PagedAttention(blocks, group=group, level=level, scores=ScoreForm(sinks, cap))
    lengths = np.array([len(keys) for keys, _ in batch.contexts])
    queries = torch.randn(9, kv_heads, group, head_dim, generator=torch.Generator().manual_seed(2)).mul_(2).to(dtype)
    attended = torch.empty_like(queries)
    kernel.run(kernel.plan_decode(batch.tables, batch.rows, lengths, window, 2), queries[:3], attended[:3], LAYER, True)
    counts = np.array([1, 3, 2])
    plan = kernel.plan_chunks(batch.tables, batch.rows, lengths, counts, window, 2)
    kernel.run(plan, queries[3:], attended[3:], LAYER, False)
    own_sinks = None if sinks is None else sinks[LAYER]
    at = 3
    for index, ((keys, values), count) in enumerate(zip(batch.contexts, counts.tolist(), strict=True)):
        values = values if num_parts == 2 else keys
        near = slice(max(0, len(keys) - window), None)
        checks = [(index, keys[near], values[near])]
        ends = range(len(keys) - count + 1, len(keys) + 1)
        checks += [(at + place, keys[:end], values[:end]) for place, end in enumerate(ends)]
        at += count
        for row, own_keys, own_values in checks:
            expected = attention(queries[row].flatten(0, 1), own_keys, own_values, own_sinks, cap)
            difference = attended[row].flatten(0, 1).double() - expected
            assert float(difference.abs().max()) < 2 * TOLERANCES[dtype], (row, len(own_keys))


@levels
@pytest.mark.parametrize("size", [64, 50, 700])
def test_contexts_cut_into_parts(size: int, level: str) -> None:
    """A token reads from the last multiple of the size on, whether it decodes or is in a chunk."""
    dtype, lengths, counts = torch.float32, np.array([1, 200, 701, 1400]), np.array([1, 130, 2, 705])
    batch = make_batch((1, 32), 16, dtype, lengths)
    queries = torch.randn(int(counts.sum()), 1, 2, 32, generator=torch.Generator().manual_seed(1))
    decoded, attended = torch.empty_like(queries[:4]), torch.empty_like(queries)
    kernel = PagedAttention(batch.blocks, group=2, level=level)
    args = (batch.tables, batch.rows, lengths)
    kernel.run(kernel.plan_decode(*args, size, 2, is_chunked=True), queries[:4], decoded, LAYER, True)
    kernel.run(kernel.plan_chunks(*args, counts, size, 2, is_chunked=True), queries, attended, LAYER, True)
    row = 0
    for index, ((keys, values), count) in enumerate(zip(batch.contexts, counts.tolist(), strict=True)):
        for end in range(len(keys) - count + 1, len(keys) + 1):
            part = slice((end - 1) // size * size, end)
            expected = attention(queries[row, 0], keys[part], values[part])
            assert float((attended[row, 0].double() - expected).abs().max()) < TOLERANCES[dtype], (index, end)
            row += 1
        part = slice((len(keys) - 1) // size * size, len(keys))
        expected = attention(queries[index, 0], keys[part], values[part])
        assert float((decoded[index, 0].double() - expected).abs().max()) < TOLERANCES[dtype], index


@levels
@dtypes
@head_dims
def test_decode_of_any_head_width(head_dim: int, dtype: torch.dtype, level: str) -> None:
    check_decode(make_batch((3, head_dim), 16, dtype), 1, level)


@levels
@dtypes
@groups
def test_decode_with_grouped_heads(group: int, dtype: torch.dtype, level: str) -> None:
    batch = make_batch((2, 64), 5, dtype)
    for window in (None, 31):
        check_decode(batch, group, level, window)


@levels
@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_a_long_context_is_divided_and_merged(num_threads: int, level: str) -> None:
    for length in (1, 191, 193, 5000):
        batch = make_batch((2, 64), 16, torch.float32, np.array([length]))
        check_decode(batch, 3, level, num_threads=num_threads)


@levels
def test_scores_far_apart(level: str) -> None:
    """The running maximum moves by hundreds from tile to tile: what came before must fade, not overflow.

    Scores of hundreds carry rounding of up to 1e-4, whatever computes them.
    """
    batch = make_batch((1, 64), 16, torch.float32, np.array([300]))
    keys, _ = batch.contexts[0]
    growth = torch.linspace(-60.0, 60.0, 300)[:, None, None]
    scaled = keys * growth
    width = -(-300 // 16)
    ids = torch.from_numpy(batch.tables[batch.rows[0], :width])
    slots = batch.blocks[ids, LAYER, 0].reshape(-1, 1, 64)
    slots[:300] = scaled
    batch.blocks[ids, LAYER, 0] = slots.view(width, 16, 1, 64)
    batch = batch._replace(contexts=[(scaled, batch.contexts[0][1])])
    for group in (2, 4):
        # A score of some hundreds is exact to 3e-5 in float32, and so is its weight.
        check_decode(batch, group, level, tolerances={torch.float32: 1e-4})


@levels
def test_what_lies_outside_is_refused(level: str) -> None:
    batch = make_batch((2, 64), 16, torch.float32, np.array([40]))
    kernel = PagedAttention(batch.blocks, group=1, level=level)
    one = np.array([40])
    for tables, rows, lengths in (
        (batch.tables, batch.rows + 10, one),  # no such row
        (batch.tables, batch.rows, one + 1000),  # longer than the table
        (batch.tables, batch.rows, np.array([2**63 - 1])),  # than any
        (batch.tables, batch.rows, one * 0),  # nothing to read
        (batch.tables + 1000, batch.rows, one),  # no such block
        (batch.tables, batch.rows, np.array([40, 40])),  # one row, two lengths
    ):
        with pytest.raises(ValueError, match=r"row|length|block"):
            kernel.plan_decode(tables, rows, lengths, None, 1)
    for counts in (one + 1, one * 0, np.array([1, 1])):
        with pytest.raises(ValueError, match="count"):
            kernel.plan_chunks(batch.tables, batch.rows, one, counts, None, 1)
    with pytest.raises(ValueError, match="block"):
        kernel.plan_chunks(batch.tables + 1000, batch.rows, one, one, None, 1)
    plan = kernel.plan_decode(batch.tables, batch.rows, one, None, 1)
    with pytest.raises(ValueError, match="layer"):
        kernel.run(plan, torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 1, 64), 2, is_windowed=False)
    with pytest.raises(AssertionError, match="dtype"):
        kernel.run(plan, torch.zeros(1, 2, 1, 64).bfloat16(), torch.zeros(1, 2, 1, 64), 0, is_windowed=False)
    with pytest.raises(AssertionError, match="not"):
        kernel.run(plan, torch.zeros(2, 2, 1, 64), torch.zeros(2, 2, 1, 64), 0, is_windowed=False)


def test_the_level_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    best = supported_levels()[0] if supported_levels() else TORCH
    assert attention_level(AUTO, CPU, torch.bfloat16) == best
    assert attention_level(TORCH, CPU, torch.float32) == TORCH
    assert attention_level(AUTO, CPU, torch.float16) == TORCH
    cuda = torch.device("cuda")
    assert attention_level(AUTO, cuda, torch.float32) == (TRITON if gpu_kernels_available(cuda) else TORCH)
    with pytest.raises(ConfigError, match="must be one of"):
        attention_level("avx9000", CPU, torch.float32)
    with pytest.raises(ConfigError, match="float16"):
        attention_level("plain", CPU, torch.float16)
    monkeypatch.setattr(native, "load_native", lambda name: None)
    assert attention_level(AUTO, CPU, torch.float32) == TORCH
