"""Kernels of single kinds of layers: latent attention and recurrences by how they are cut; sinks and caps beside none.

Shapes are published ones: DeepSeek V3's latents, Qwen3-Next's gated delta rule, Granite 4's Mamba-2, gpt-oss's heads.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.attention.triton_backend import GpuPlanner
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.dtypes import dtype_name
from alignedserve.runtime.kv.block_storage import BlockStorage
from benchmarks.kernels.attention_batches import attention_batch, num_blocks_of
from benchmarks.kernels.cases import TRITON, KernelCase, KernelSetup
from kernels.attention import ScoreForm
from kernels.gpu import state_convolutions, state_scans
from kernels.gpu.attention.decode_attention import decode_batch
from kernels.gpu.attention.latent_attention import LatentTiling, latent_decode, latent_prefill
from kernels.gpu.attention.prefill_attention import ChunkBatch, chunk_tiles
from kernels.gpu.attention.work_partition import partition
from kernels.gpu.blocks import BlockTables, BlockView
from kernels.states.device_rows import DeviceStatePlan, StateKernels
from kernels.states.state_rows import NO_BLOCK, StateParts, StateRows

_BLOCK_SIZE, _ROPE, _RANK = 16, 64, 512
_BATCHES, _TOY_BATCHES = ((64, 4096), (8, 4096), (1, 32_768)), ((2, 40),)
_CHUNK, _TOY_CHUNK = (2048, 4096), (8, 24)  # new tokens, of a context
_TILINGS = [  # a compiler takes some seconds for each
    LatentTiling(*sizes)
    for sizes in (
        *((64, 16, 8, 2), (64, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 2), (128, 16, 16, 2)),
        *((32, 32, 4, 2), (32, 64, 8, 2), (16, 32, 4, 2), (16, 64, 4, 3)),
    )
]
_PARTS = (256, 512, 1024, 2048, 4096)  # elements of a state in one program


def latent_sweep(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield a group per tiling: decodes over every batch, and a chunk. One that needs more memory than there is fails
    alone."""
    if not setup.runs_triton:
        return
    num_heads = 4 if setup.is_toy else 128
    for tiling in _TILINGS[:1] if setup.is_toy else _TILINGS:
        by = "{} rows, {} tokens, {} warps, {} stages".format(*tiling)
        batches = _TOY_BATCHES if setup.is_toy else _BATCHES
        yield [_latents(setup, num_heads, batch, tiling, by) for batch in batches]
        yield [_chunk(setup, num_heads, tiling, by)]


def _latents(setup: KernelSetup, num_heads: int, batch: tuple[int, int], tiling: LatentTiling, by: str) -> KernelCase:
    count, length = batch
    lengths = np.full(count, length)
    device = setup.device
    at_once = 1 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count
    side_by_side = -(-num_heads // max(16, tiling.heads(num_heads)))
    parts = partition(lengths, tile=tiling.tokens, num_programs=max(1, at_once // side_by_side))
    view, tables, placed = _rows(setup, lengths, [*parts, lengths.astype(np.int32)])
    *arrays, there = placed
    own = decode_batch(tables, there, arrays, (1, num_heads, _RANK))
    queries = setup.randn(count, 1, num_heads, _ROPE + _RANK)
    run = partial(latent_decode, queries, torch.empty_like(queries), view, own, rank=_RANK, tiling=tiling)
    operations = 2 * int(lengths.sum()) * num_heads * (_ROPE + 2 * _RANK)
    return KernelCase(
        "latent decode", f"{count} x {length}", by, run, _bytes(setup, lengths), operations, is_copy=False
    )


def _chunk(setup: KernelSetup, num_heads: int, tiling: LatentTiling, by: str) -> KernelCase:
    count, length = _TOY_CHUNK if setup.is_toy else _CHUNK
    lengths, counts = np.array([length]), np.array([count])
    tiles = chunk_tiles(lengths, counts, group=tiling.heads(num_heads), query_rows=tiling.query_rows)
    view, tables, placed = _rows(setup, lengths, list(tiles))
    queries = setup.randn(count, 1, num_heads, _ROPE + _RANK)
    batch = ChunkBatch(tables, placed)
    run = partial(latent_prefill, queries, torch.empty_like(queries), view, batch, rank=_RANK, tiling=tiling)
    read = count * (length - count) + count * (count + 1) // 2  # pairs of a token and one that it reads
    operations = 2 * read * num_heads * (_ROPE + 2 * _RANK)
    return KernelCase(
        "latent chunk", f"{count} of {length}", by, run, _bytes(setup, lengths), operations, is_copy=False
    )


def _rows(setup: KernelSetup, lengths: Any, arrays: list[Any]) -> tuple[BlockView, BlockTables, list[Tensor]]:
    layout = BlockLayout(_BLOCK_SIZE, 1, 1, _ROPE + _RANK, dtype_name(setup.dtype), num_parts=1)
    blocks = setup.randn(num_blocks_of(lengths.tolist(), _BLOCK_SIZE), 1, 1, _BLOCK_SIZE, 1, layout.head_dim)
    widths = -(-lengths // _BLOCK_SIZE)
    entries = np.random.default_rng(0).permutation(int(widths.sum())).astype(np.int32)
    starts = (np.cumsum(widths) - widths).astype(np.int32)
    tables = to_device([entries, starts, np.zeros(len(lengths), np.int8), *arrays], setup.device)
    return BlockView(blocks, 0), BlockTables(*tables[:3]), tables[3:]


def _bytes(setup: KernelSetup, lengths: Any) -> int:
    return int(lengths.sum()) * (_ROPE + _RANK) * setup.dtype.itemsize


def state_sweep(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield a group per size of a program's part of a state: both recurrences, of decodes and of a prompt."""
    if not setup.runs_triton:
        return
    batches = ((2, 1), (1, 4)) if setup.is_toy else ((64, 1), (8, 1), (1, 2048), (8, 512))
    for elements in _PARTS[:1] if setup.is_toy else _PARTS:
        yield [
            _scan(setup, kind, batch, elements) for kind, batch in itertools.product(("delta rule", "Mamba-2"), batches)
        ]


def _scan(setup: KernelSetup, kind: str, batch: tuple[int, int], elements: int) -> KernelCase:
    count, tokens = batch
    heads, size, width = (2, 16, 16) if setup.is_toy else ((32, 128, 128) if kind == "delta rule" else (64, 128, 64))
    firsts = np.arange(count) * tokens
    parts = StateParts(firsts + tokens - 1, np.arange(count), np.full(count, tokens), np.arange(count))
    sequences = StateRows(firsts, np.full(count, NO_BLOCK), parts)
    plan = DeviceStatePlan(StateKernels(state_scans, state_convolutions), sequences)
    rows = plan.bound(to_device(plan.host_arrays, setup.device))
    device = setup.device
    states = torch.zeros((count, heads, size, width), device=device)
    shared = torch.randn((count * tokens, size * (heads // 2 if kind == "delta rule" else 1)), device=device)
    values, gates = (
        torch.randn((count * tokens, heads * width), device=device),
        torch.rand((count * tokens, heads), device=device),
    )

    def run() -> object:
        state_scans.PART_ELEMENTS = elements
        if kind == "delta rule":
            return state_scans.scan_delta((shared, shared, values), (gates, gates), rows, states, eps=1e-6)
        skip = torch.ones(heads, device=device)
        return state_scans.scan_space((values, shared, shared), (gates, gates), skip, rows, states)

    num_bytes = 2 * states.nbytes + 2 * values.nbytes + 2 * shared.nbytes
    return KernelCase(kind, f"{count} x {tokens}", f"{elements} elements", run, num_bytes)


def score_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield groups of decodes: plain, with sinks, and with a cap."""
    if not setup.runs_triton:
        return
    kv_heads, group, head_dim = (1, 2, 16) if setup.is_toy else (8, 8, 64)
    for count, length in _TOY_BATCHES if setup.is_toy else _BATCHES:
        lengths = [length] * count
        layout = BlockLayout(_BLOCK_SIZE, 1, kv_heads, head_dim, dtype_name(setup.dtype))
        storage = BlockStorage(layout, num_blocks_of(lengths, _BLOCK_SIZE), setup.device, has_scratch=True)
        storage.blocks.normal_()
        batch = attention_batch(storage, lengths, 1)
        sinks = torch.zeros((1, kv_heads * group), device=setup.device)
        queries = setup.randn(count, kv_heads, group, head_dim)
        cases = []
        for by, form in ((TRITON, ScoreForm()), ("sinks", ScoreForm(sinks)), ("cap", ScoreForm(cap=30.0))):
            step = batch.decodes(GpuPlanner(batch.table, storage, None, group, scores=form))
            run = partial(step.decode, queries, torch.empty_like(queries), 0, False)
            num_bytes = sum(lengths) * layout.token_bytes
            cases.append(
                KernelCase("decode, forms of scores", f"{count} x {length}", by, run, num_bytes, is_copy=False)
            )
        yield cases
