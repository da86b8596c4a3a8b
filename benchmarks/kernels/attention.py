"""Attention as the benchmark of the kernels measures it: batches and chunks by every planner that runs here."""

import importlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.attention.backend import AttentionPlanner, StepAttention
from alignedserve.runtime.attention.libraries import LEAST_GATHERED_CHUNK, LIBRARIES, PYTORCH
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.dtypes import dtype_name
from alignedserve.runtime.kv.block_storage import BlockStorage
from benchmarks.kernels.attention_batches import AttentionBatch, attention_batch, num_blocks_of
from benchmarks.kernels.cases import TRITON, KernelCase, KernelSetup

DECODE, PREFILL = "decode", "prefill"
NAIVE = "undivided"  # one program per sequence and key head
_BLOCK_SIZE = 16
_NUM_LAYERS = 2  # taken in turn

Groups = tuple[tuple[int, int], ...]  # how many sequences of which length

# The second is as many tokens as the third in as many sequences.
BATCHES: tuple[Groups, ...] = (((64, 4096),), ((60, 256), (4, 16384)), ((64, 1264),), ((64, 1024),), ((1, 16384),))
TOY_BATCHES: tuple[Groups, ...] = (((4, 64),), ((3, 16), (1, 112)), ((4, 40),), ((4, 32),), ((1, 96),))
# (sequences, new tokens of each, context that the new tokens end)
CHUNKS = ((1, 4096, 4096), (1, 512, 4096), (32, 128, 1152))
TOY_CHUNKS = ((1, 32, 32), (1, 8, 40), (2, 8, 24))
_BLOCK_SIZES = (16, 128)
_PROMPTS = ((1, 4096, 4096), (8, 512, 512), (1, 512, 4096), (1, 2048, 32768), (32, 128, 1152), (64, 16, 2064))
_TOY_PROMPTS = ((1, 32, 32), (2, 8, 24))


def name_of(groups: Groups) -> str:
    return " + ".join(f"{number} x {length}" for number, length in groups)


def batches(setup: KernelSetup) -> tuple[Groups, ...]:
    """Return the decode batches of this benchmark; the second is mixed, the third is as many tokens evenly long."""
    return TOY_BATCHES if setup.is_toy else BATCHES


def attention_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield groups to be measured by turns: all decode batches, then the chunks."""
    chunks = TOY_CHUNKS if setup.is_toy else CHUNKS
    lengths = [_lengths(groups) for groups in batches(setup)]
    lengths += [[context] * sequences for sequences, _, context in chunks]
    config = setup.config
    layout = BlockLayout(_BLOCK_SIZE, _NUM_LAYERS, config.num_kv_heads, config.head_dim, dtype_name(setup.dtype))
    storage = BlockStorage(
        layout, max(num_blocks_of(own, _BLOCK_SIZE) for own in lengths), setup.device, has_scratch=True
    )
    storage.blocks.normal_()
    yield [kernel_case for groups in batches(setup) for kernel_case in _decode_cases(setup, storage, groups)]
    for sequences, num_new, context in chunks:
        yield list(prefill_cases(setup, storage, sequences, num_new, context))


def _lengths(groups: Groups) -> list[int]:
    return [length for number, length in groups for _ in range(number)]


def _planners(setup: KernelSetup, batch: AttentionBatch) -> dict[str, AttentionPlanner]:
    found = batch.planners(setup.config)
    return {by: planner for by, planner in found.items() if by not in (TRITON, *LIBRARIES) or setup.runs_triton}


def _decode_cases(setup: KernelSetup, storage: BlockStorage, groups: Groups) -> Iterator[KernelCase]:
    config, lengths = setup.config, _lengths(groups)
    num_tokens = sum(lengths)
    batch = attention_batch(storage, lengths, 1)
    queries = setup.randn(len(lengths), config.num_kv_heads, config.group_size, config.head_dim)
    num_bytes = num_tokens * 2 * config.kv_width * setup.dtype.itemsize
    num_operations = 4 * num_tokens * config.query_width

    def kernel_case(by: str, run: Callable[[int], object]) -> KernelCase:
        return KernelCase(DECODE, name_of(groups), by, _in_turn(run), num_bytes, num_operations, is_copy=False)

    planners = {by: planner for by, planner in _planners(setup, batch).items() if by not in LIBRARIES}
    for by, planner in planners.items():
        yield kernel_case(by, _decoding(batch.decodes(planner), queries))
    if TRITON in planners:
        yield kernel_case(NAIVE, _naively_decoding(batch, planners[TRITON], queries))


def _decoding(step: StepAttention, queries: torch.Tensor) -> Callable[[int], object]:
    out = torch.empty_like(queries)
    return lambda layer: step.decode(queries, out, layer, False)


def _naively_decoding(batch: AttentionBatch, planner: Any, queries: torch.Tensor) -> Callable[[int], object]:
    naive, places, decoding = (
        importlib.import_module(name)
        for name in (
            "benchmarks.kernels.naive_decode",
            "kernels.gpu.blocks",
            "kernels.gpu.attention.decode_attention",
        )
    )
    lengths = batch.table.num_computed[batch.rows] + 1
    _, starts, is_reversed, entries = to_device(planner.block_arrays(batch.rows, lengths), batch.storage.device)
    whole = naive.naive_batch(places.BlockTables(entries, starts, is_reversed), lengths, planner.heads)
    out, blocks = torch.empty_like(queries), batch.storage.blocks
    return lambda layer: decoding.paged_decode(queries, out, places.BlockView(blocks, layer), whole)


def prefill_cases(
    setup: KernelSetup, storage: BlockStorage, sequences: int, num_new: int, context: int
) -> Iterator[KernelCase]:
    config = setup.config
    batch = attention_batch(storage, [context] * sequences, num_new)
    num_tokens = sequences * num_new
    queries = setup.randn(num_tokens, config.num_kv_heads, config.group_size, config.head_dim)
    # Where nothing was computed before, the gathering kernel takes them from here instead of from blocks.
    new = (setup.randn(num_tokens, config.kv_width), setup.randn(num_tokens, config.kv_width))
    # Both products of a query with the keys up to its own: two operations each per element.
    num_pairs = sequences * sum(range(context - num_new + 1, context + 1))
    cached = "" if context == num_new else f" after {context - num_new}"
    # Which copies contexts in blocks of 16 tokens, and leaves short chunks behind them to our kernel.
    without = {PYTORCH} if cached and num_new < LEAST_GATHERED_CHUNK else set()
    for by, planner in _planners(setup, batch).items():
        if by in without:
            continue
        yield KernelCase(
            PREFILL,
            f"{sequences} x {num_new}{cached}",
            by,
            _in_turn(_computing(batch.chunks(planner, num_new), queries, new)),
            sequences * context * 2 * config.kv_width * setup.dtype.itemsize,
            4 * num_pairs * config.query_width,
            is_copy=False,
        )


def prompt_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield whole prompts, chunks behind cached tokens and many short ones, over blocks of each size."""
    sizes, config = _TOY_PROMPTS if setup.is_toy else _PROMPTS, setup.config
    for block_size in _BLOCK_SIZES:
        layout = BlockLayout(block_size, _NUM_LAYERS, config.num_kv_heads, config.head_dim, dtype_name(setup.dtype))
        num_blocks = max(num_blocks_of([context] * number, block_size) for number, _, context in sizes)
        storage = BlockStorage(layout, num_blocks, setup.device, has_scratch=True)
        storage.blocks.normal_()
        for size in sizes:
            cases = prefill_cases(setup, storage, *size)
            yield [case._replace(case=f"{case.case}, blocks of {block_size}") for case in cases]


def _computing(
    step: StepAttention, queries: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor]
) -> Callable[[int], object]:
    out = torch.empty_like(queries)
    return lambda layer: step.chunks(queries, new, out, layer, False)


def _in_turn(run: Callable[[int], object]) -> Callable[[], object]:
    calls = count()
    return lambda: run(next(calls) % _NUM_LAYERS)
