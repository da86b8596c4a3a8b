"""Decode attention by tile, warps, stages and programs on a multiprocessor, and over caches of FP8."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count, product
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from typing_extensions import override

from alignedserve.core.block_layout import FP8, BlockLayout
from alignedserve.runtime.attention.triton_backend import GpuPlanner
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.dtypes import dtype_name
from alignedserve.runtime.kv.block_storage import BlockStorage
from benchmarks.kernels.attention import DECODE, name_of
from benchmarks.kernels.attention_batches import attention_batch, num_blocks_of
from benchmarks.kernels.cases import TRITON, KernelCase, KernelSetup
from kernels.gpu.attention.decode_attention import DecodeBatch, DecodeTiling, decode_batch, paged_decode
from kernels.gpu.attention.work_partition import partition
from kernels.gpu.blocks import BlockTables, BlockView

_LAYERS, _BLOCK_SIZE = 2, 16
_BATCHES, _TOY_BATCHES = (((64, 4096),), ((60, 256), (4, 16384))), (((3, 40),),)


class _Choice(NamedTuple):
    tiling: DecodeTiling
    at_once: int  # programs on a multiprocessor

    @override
    def __str__(self) -> str:
        keys, warps, stages = self.tiling
        return f"tile {keys}, {warps} warps, {stages} stages, {self.at_once} programs"


_CHOICES = [
    _Choice(DecodeTiling(*sizes), at_once)
    for *sizes, at_once in product((32, 64, 128), (2, 4, 8), (3, 4, 5, 6), (2, 3, 4))
]
_TOY_CHOICES = [_Choice(DecodeTiling(32, 4, 3), 2), _Choice(DecodeTiling(64, 2, 4), 3)]


def sweep_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    batches = _TOY_BATCHES if setup.is_toy else _BATCHES
    runs = [_Decodes(setup, groups, dtype_name(setup.dtype)) for groups in batches] if setup.runs_triton else []
    for choice in _TOY_CHOICES if setup.is_toy else _CHOICES:
        yield [run.case(str(choice), choice) for run in runs]


def cache_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield a group per batch: over a cache of the model's dtype and over one of FP8, as an engine computes them."""
    if not setup.runs_triton:
        return
    for groups in _TOY_BATCHES if setup.is_toy else _BATCHES:
        runs = [_Decodes(setup, groups, dtype) for dtype in (dtype_name(setup.dtype), FP8)]
        yield [run.case(f"{TRITON}, cache of {run.cache}") for run in runs]


class _Decodes:
    """One batch of decodes over contexts of any content."""

    def __init__(self, setup: KernelSetup, groups: Sequence[tuple[int, int]], cache: str) -> None:
        config = setup.config
        lengths = [length for number, length in groups for _ in range(number)]
        layout = BlockLayout(_BLOCK_SIZE, _LAYERS, config.num_kv_heads, config.head_dim, cache)
        storage = BlockStorage(layout, num_blocks_of(lengths, _BLOCK_SIZE), setup.device, has_scratch=True)
        storage.bytes.fill_(0x31)  # a small number in every dtype
        self.cache, self._setup, self._groups = cache, setup, tuple(groups)
        self._batch = attention_batch(storage, lengths, 1)
        self._planner = GpuPlanner(self._batch.table, storage, None, config.group_size)
        self._queries = setup.randn(len(lengths), config.num_kv_heads, config.group_size, config.head_dim)
        self._num_bytes = sum(lengths) * layout.token_bytes // _LAYERS

    def case(self, by: str, choice: _Choice | None = None) -> KernelCase:
        run = self._planned() if choice is None else self._chosen(choice)
        calls = count()
        kernel = DECODE + (" over caches" if choice is None else " sweep")
        return KernelCase(
            kernel,
            name_of(self._groups),
            by,
            lambda: run(next(calls) % _LAYERS),
            self._num_bytes,
            is_copy=False,
        )

    def _planned(self) -> Callable[[int], object]:
        step, out = self._batch.decodes(self._planner), torch.empty_like(self._queries)
        return lambda layer: step.decode(self._queries, out, layer, False)

    def _chosen(self, choice: _Choice) -> Callable[[int], object]:
        batch = self._decode_batch(choice)
        out, blocks = torch.empty_like(self._queries), self._batch.storage.blocks

        def run(layer: int) -> object:
            return paged_decode(self._queries, out, BlockView(blocks, layer), batch, tiling=choice.tiling)

        return run

    def _decode_batch(self, choice: _Choice) -> DecodeBatch:
        lengths, device = self._batch.table.num_computed[self._batch.rows] + 1, self._setup.device
        num_programs = self._multiprocessors() * choice.at_once // self._planner.heads[0]
        parts = partition(lengths, tile=choice.tiling.keys, num_programs=max(1, num_programs))
        arrays: list[npt.NDArray[Any]] = [*parts, *self._planner.block_arrays(self._batch.rows, lengths)]
        *tables, sizes, starts, is_reversed, entries = to_device(arrays, device)
        return decode_batch(BlockTables(entries, starts, is_reversed), sizes, tables, self._planner.heads)

    def _multiprocessors(self) -> int:
        if self._setup.device.type != "cuda":
            return 2 * self._planner.heads[0]
        return int(torch.cuda.get_device_properties(self._setup.device).multi_processor_count)
