"""Attention over a cache of int8, native and by plain PyTorch, against float64 over the values that the cache holds."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.core.block_layout import INT8, BlockLayout
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.backend import AUTO, TORCH
from alignedserve.runtime.attention.registry import attention_planner
from alignedserve.runtime.attention.sequence_table import NewSequence, SequenceTable
from alignedserve.runtime.attention.torch_backend import GatheredPlanner
from alignedserve.runtime.kv.block_storage import BlockStorage
from kernels.cache_rows import dequantise_rows, quantise_rows
from kernels.cpu.native import supported_levels
from kernels.cpu.paged_attention import Int8Heads, Int64Array, PagedAttention
from lab.profiling.shapes import TOY
from tests.support.kernel_reference import attention, attention_of_chunk
from tests.support.marks import slow

pytestmark = pytest.mark.slow

# What the values lose between cache and result: products in float32 lose as little as without rounding. Products of
# integers of 16 bits lose more: some hundredth of what rounding to the cache has lost, two of them in heads of a few
# elements, whose errors do not average out.
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
INTEGERS, INTEGERS_TOLERANCE, NARROW_HEAD = ("amx", "avx512bf16"), 2e-4, 16
LENGTHS = [1, 3, 33, 100, 1501, 31, 32, 64, 129]
LAYER = 1

levels = pytest.mark.parametrize("level", supported_levels() or [pytest.param("", marks=pytest.mark.skip("not built"))])
backends = pytest.mark.parametrize("backend", [*supported_levels(), TORCH])
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES))
# Sums of integers over 520 elements might overflow: floats take their place.
SHAPES = [(64, 1), (80, 3), (7, 8), (520, 1)]
shapes = pytest.mark.parametrize("shape", [*SHAPES, *slow((96, 2), (128, 4), (24, 5), (512, 6), (64, 7))])


class Batch(NamedTuple):
    storage: BlockStorage  # bytes of NaN wherever no sequence has a token
    table: SequenceTable
    rows: Int64Array
    contexts: list[tuple[Tensor, Tensor]]  # the values of keys and values [length, kv_heads, head_dim]


def make_batch(heads: tuple[int, int], block_size: int, lengths: list[int]) -> Batch:
    """Make sequences of random content in shuffled blocks. `heads`: kv_heads, head_dim."""
    kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(sum(heads) + block_size)
    widths = [-(-length // block_size) for length in lengths]
    storage = BlockStorage(BlockLayout(block_size, 2, kv_heads, head_dim, INT8), sum(widths) + 3)
    storage.bytes.fill_(0xFF)
    table = SequenceTable(max_sequences=len(lengths) + 1, max_context_len=max(lengths) + 1, block_size=block_size)
    free = torch.randperm(storage.num_blocks, generator=generator).tolist()
    rows, contexts = [], []
    for index, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        blocks = tuple(BlockId(free.pop()) for _ in range(width))
        once = SamplingParams(max_tokens=1)
        rows.append(table.add(NewSequence(RequestId(str(index)), (0,) * (length + 1), length, 0, blocks, once)))
        content = []
        slots = torch.tensor([b * storage.slot_stride + i for b in blocks for i in range(block_size)])[:length]
        for cached in (storage.key_slots(LAYER), storage.value_slots(LAYER)):
            cached[slots] = own = quantise_rows(torch.randn(length, *heads, generator=generator))
            values = torch.empty(length, kv_heads * head_dim)
            content.append(dequantise_rows(own, kv_heads, values).view(length, *heads))
        contexts.append((content[0], content[1]))
    return Batch(storage, table, np.array(rows), contexts)


def queries_of(batch: Batch, count: int, group: int, dtype: torch.dtype) -> Tensor:
    """Return rows of a wider tensor, as the product of all three projections gives them."""
    kv_heads, head_dim = batch.contexts[0][0].shape[1:]
    generator = torch.Generator().manual_seed(group)
    return torch.randn(count, 2 * kv_heads, group, head_dim, generator=generator).to(dtype)[:, :kv_heads]


def attend(
    batch: Batch, counts: list[int] | None, queries: Tensor, backend: str, window: int | None, num_threads: int = 2
) -> Tensor:
    """`counts`: tokens of chunks; None: one of each, decoded."""
    out = torch.full(queries.shape, float("nan"), dtype=queries.dtype)
    kv_heads, group = queries.shape[1:3]
    lengths = np.array([len(keys) for keys, _ in batch.contexts])
    if backend == TORCH:
        batch.table.num_computed[batch.rows] = lengths - (1 if counts is None else np.array(counts))
        clear_unused_slots(batch)
        planner = GatheredPlanner(batch.table, batch.storage, window, queries.dtype)
        none = batch.rows[:0]
        if counts is None:
            step = planner.plan(batch.rows, none, none)
            order = [batch.rows.tolist().index(row) for row in step.decode_rows.tolist()]
            ordered = torch.empty_like(out)
            step.decode(queries[order], ordered, LAYER, True)
            out[order] = ordered
        else:
            new = torch.full((len(queries), kv_heads * queries.shape[3]), float("nan"), dtype=queries.dtype)
            planner.plan(none, batch.rows, np.array(counts)).chunks(queries, (new, new), out, LAYER, True)
        return out
    kernel = PagedAttention(batch.storage.blocks, group=group, level=backend, int8=Int8Heads(kv_heads, queries.dtype))
    tables = batch.table.block_tables
    if counts is None:
        plan = kernel.plan_decode(tables, batch.rows, lengths, window, num_threads)
    else:
        plan = kernel.plan_chunks(tables, batch.rows, lengths, np.array(counts), window, num_threads)
    kernel.run(plan, queries, out, LAYER, is_windowed=True)
    return out


def clear_unused_slots(batch: Batch) -> None:
    """Clear unused slots: plain PyTorch reads whole blocks, which the engine clears."""
    block_size = batch.table.block_size
    for row, (keys, _) in zip(batch.rows.tolist(), batch.contexts, strict=True):
        if len(keys) % block_size:
            batch.storage.zero_tail(
                BlockId(int(batch.table.block_tables[row, len(keys) // block_size])), len(keys) % block_size
            )


def tolerance_of(dtype: torch.dtype, backend: str, head_dim: int) -> float:
    if backend not in INTEGERS:
        return TOLERANCES[dtype]
    return max(TOLERANCES[dtype], INTEGERS_TOLERANCE * (2 if head_dim < NARROW_HEAD else 1))


def check_decode(
    batch: Batch, group: int, dtype: torch.dtype, backend: str, window: int | None = None, num_threads: int = 2
) -> None:
    queries = queries_of(batch, len(batch.contexts), group, dtype)
    attended = attend(batch, None, queries, backend, window, num_threads)
    tolerance = tolerance_of(dtype, backend, queries.shape[-1])
    for index, (keys, values) in enumerate(batch.contexts):
        first = max(0, len(keys) - window) if window is not None else 0
        expected = attention(queries[index].flatten(0, 1), keys[first:], values[first:])
        difference = attended[index].flatten(0, 1).double() - expected
        assert float(difference.abs().max()) < tolerance, f"length {len(keys)}"


def check_chunks(
    batch: Batch, counts: list[int], group: int, dtype: torch.dtype, backend: str, window: int | None = None
) -> None:
    queries = queries_of(batch, sum(counts), group, dtype)
    attended = attend(batch, counts, queries, backend, window)
    tolerance, at = tolerance_of(dtype, backend, queries.shape[-1]), 0
    for (keys, values), count in zip(batch.contexts, counts, strict=True):
        own = slice(at, at + count)
        expected = attention_of_chunk(queries[own].flatten(1, 2), keys, values, window)
        difference = attended[own].flatten(1, 2).double() - expected
        assert float(difference.abs().max()) < tolerance, f"{count} of {len(keys)}"
        at += count


@backends
@dtypes
@shapes
def test_decodes_and_chunks_of_any_head(shape: tuple[int, int], dtype: torch.dtype, backend: str) -> None:
    head_dim, group = shape
    check_decode(make_batch((3, head_dim), 16, LENGTHS), group, dtype, backend)
    check_chunks(make_batch((2, head_dim), 8, [5, 129, 300]), [5, 129, 77], group, dtype, backend)


@levels
@dtypes
def test_random_shapes(dtype: torch.dtype, level: str) -> None:
    draw = np.random.default_rng(3).integers
    for _ in range(6):
        lengths = draw(1, 400, size=3).tolist()
        batch = make_batch((int(draw(1, 4)), int(draw(1, 140))), int(draw(1, 70)), lengths)
        group, window = int(draw(1, 9)), int(draw(1, 300))
        check_decode(batch, group, dtype, level, window, int(draw(1, 4)))
        check_chunks(batch, [int(draw(1, length + 1)) for length in lengths], group, dtype, level, window)


@levels
def test_the_largest_sums_of_integers_do_not_overflow(level: str) -> None:
    """Every element as large as the next: those of the widest head that is summed in integers add up to 2^31 - 2^24."""
    length, head_dim = 64, 512
    batch = make_batch((1, head_dim), length, [length])
    signs = torch.tensor([1.0, -1.0]).repeat(length // 2)
    rows = quantise_rows(signs.view(length, 1, 1).expand(length, 1, head_dim))
    first = int(batch.table.block_tables[batch.rows[0], 0]) * batch.storage.slot_stride
    for slots in (batch.storage.key_slots(LAYER), batch.storage.value_slots(LAYER)):
        slots[first : first + length] = rows
    for counts, num_rows in ((None, 1), ([2], 2)):
        out = attend(batch, counts, torch.ones(num_rows, 1, 1, head_dim), level, None)
        assert torch.allclose(out, torch.ones_like(out), atol=1e-3)


def test_a_gpu_is_refused_by_name() -> None:
    storage = BlockStorage(TOY.block_layout(8, INT8), 2, "meta", has_scratch=False)
    table = SequenceTable(max_sequences=1, max_context_len=8, block_size=8)
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8 is computed on CPUs alone, not on meta"):
        attention_planner(AUTO, table, storage, TOY, torch.float32)
