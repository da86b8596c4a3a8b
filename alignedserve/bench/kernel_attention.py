"""Attention as the benchmark of the kernels measures it: batches and chunks by every planner that runs here."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch

from alignedserve.bench.attention_batches import AttentionBatch, attention_batch, num_blocks_of
from alignedserve.bench.kernel_work import TRITON, KernelBench, KernelWork
from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.attention import AttentionPlanner, StepAttention
from alignedserve.runtime.block_storage import BlockStorage
from alignedserve.runtime.device_arrays import to_device
from alignedserve.runtime.dtypes import dtype_name
from kernels.gpu_choice import gpu_kernels_run

DECODE, PREFILL = "decode attention", "prefill attention"
NAIVE = "one program per sequence"
_BLOCK_SIZE = 16
_NUM_LAYERS = 2  # taken in turn

Groups = tuple[tuple[int, int], ...]  # how many sequences of which length

# The second is as many tokens as the third in as many sequences.
BATCHES: tuple[Groups, ...] = (((64, 4096),), ((60, 256), (4, 16384)), ((64, 1264),), ((64, 1024),), ((1, 16384),))
TOY_BATCHES: tuple[Groups, ...] = (((4, 64),), ((3, 16), (1, 112)), ((4, 40),), ((4, 32),), ((1, 96),))
# (sequences, new tokens of each, context that the new tokens end)
CHUNKS = ((1, 4096, 4096), (1, 512, 4096), (32, 128, 1152))
TOY_CHUNKS = ((1, 32, 32), (1, 8, 40), (2, 8, 24))


def name_of(groups: Groups) -> str:
    """As rows show it."""
    return " + ".join(f"{number} x {length}" for number, length in groups)


def batches(bench: KernelBench) -> tuple[Groups, ...]:
    """The decode batches of this benchmark; the second is mixed, the third is as many tokens evenly long."""
    return TOY_BATCHES if bench.is_toy else BATCHES


def attention_works(bench: KernelBench) -> Iterator[list[KernelWork]]:
    """Groups to be measured by turns: all decode batches, then the chunks."""
    chunks = TOY_CHUNKS if bench.is_toy else CHUNKS
    lengths = [_lengths(groups) for groups in batches(bench)]
    lengths += [[context] * sequences for sequences, _, context in chunks]
    config = bench.config
    layout = BlockLayout(_BLOCK_SIZE, _NUM_LAYERS, config.num_kv_heads, config.head_dim, dtype_name(bench.dtype))
    storage = BlockStorage(
        layout, max(num_blocks_of(own, _BLOCK_SIZE) for own in lengths), bench.device, has_scratch=True
    )
    storage.blocks.normal_()
    yield [work for groups in batches(bench) for work in _decode_works(bench, storage, groups)]
    for sequences, num_new, context in chunks:
        yield list(_prefill_works(bench, storage, sequences, num_new, context))


def _lengths(groups: Groups) -> list[int]:
    return [length for number, length in groups for _ in range(number)]


def _planners(bench: KernelBench, batch: AttentionBatch) -> dict[str, AttentionPlanner]:
    found = batch.planners(bench.config)
    if gpu_kernels_run(bench.device) and not bench.runs_triton:
        found.pop(TRITON, None)
    return found


def _decode_works(bench: KernelBench, storage: BlockStorage, groups: Groups) -> Iterator[KernelWork]:
    config, lengths = bench.config, _lengths(groups)
    num_tokens = sum(lengths)
    batch = attention_batch(storage, lengths, 1)
    queries = bench.randn(len(lengths), config.num_kv_heads, config.group_size, config.head_dim)
    num_bytes = num_tokens * 2 * config.kv_width * bench.dtype.itemsize
    num_operations = 4 * num_tokens * config.query_width

    def work(by: str, run: Callable[[int], object]) -> KernelWork:
        return KernelWork(DECODE, name_of(groups), by, _in_turn(run), num_bytes, num_operations, is_copy=False)

    planners = _planners(bench, batch)
    for by, planner in planners.items():
        yield work(by, _decoding(batch.decodes(planner), queries))
    if TRITON in planners and importlib.util.find_spec("kernels.gpu.naive_decode") is not None:
        yield work(NAIVE, _naively_decoding(batch, planners[TRITON], queries))


def _decoding(step: StepAttention, queries: torch.Tensor) -> Callable[[int], object]:
    out = torch.empty_like(queries)
    return lambda layer: step.decode(queries, out, layer, False)


def _naively_decoding(batch: AttentionBatch, planner: Any, queries: torch.Tensor) -> Callable[[int], object]:
    """By the kernel that only benchmarks use, over the arrays of the planner for the GPU."""
    naive, places = (importlib.import_module(f"kernels.gpu.{name}") for name in ("naive_decode", "blocks"))
    lengths, tables = planner.decode_contexts(batch.rows, 0)
    lengths, *tables = to_device([lengths, *tables], batch.storage.device)
    out, blocks, contexts = torch.empty_like(queries), batch.storage.blocks, places.BlockTables(*tables)
    return lambda layer: naive.naive_decode(queries, out, places.BlockView(blocks, layer), contexts, lengths)


def _prefill_works(
    bench: KernelBench, storage: BlockStorage, sequences: int, num_new: int, context: int
) -> Iterator[KernelWork]:
    config = bench.config
    batch = attention_batch(storage, [context] * sequences, num_new)
    num_tokens = sequences * num_new
    queries = bench.randn(num_tokens, config.num_kv_heads, config.group_size, config.head_dim)
    # Where nothing was computed before, the gathering kernel takes them from here instead of from blocks.
    new = (bench.randn(num_tokens, config.kv_width), bench.randn(num_tokens, config.kv_width))
    # Both products of a query with the keys up to its own: two operations each per element.
    num_pairs = sequences * sum(range(context - num_new + 1, context + 1))
    cached = "" if context == num_new else f" after {context - num_new}"
    for by, planner in _planners(bench, batch).items():
        step, out = batch.chunks(planner, num_new), torch.empty_like(queries)
        yield KernelWork(
            PREFILL,
            f"{sequences} x {num_new}{cached}",
            by,
            _in_turn(lambda layer, step=step, out=out: step.chunks(queries, new, out, layer, False)),
            sequences * context * 2 * config.kv_width * bench.dtype.itemsize,
            4 * num_pairs * config.query_width,
            is_copy=False,
        )


def _in_turn(run: Callable[[int], object]) -> Callable[[], object]:
    """A layer at each call, one after the other."""
    calls = count()
    return lambda: run(next(calls) % _NUM_LAYERS)
