"""The choice of kernels for prompts and chunks: ours, or those of an installed library that is faster here.

Measured when an engine starts, on its model's heads and blocks: every kernel computes the same queries over the same
random keys and values. A library that fails, or whose results are not ours, is left out, which the log says.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.backend import AttentionPlanner
from alignedserve.runtime.attention.libraries import OWN, AttentionLibrary
from alignedserve.runtime.attention.sequence_table import NewSequence, SequenceTable, tokens_of
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.timing import DeviceTimer
from alignedserve.runtime.kv.block_storage import BlockStorage

logger = logging.getLogger(__name__)

_ROUNDS, _WARM_UPS = 9, 3
# Of results whose values are normally distributed: rounding of weights and sums to the dtype.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_LONGEST_REASON = 300
_ONCE = SamplingParams(max_tokens=1)


class ChunkShape(NamedTuple):
    """Contexts to measure with, and the last tokens of each that are computed."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]

    @override
    def __str__(self) -> str:
        cached = sum(self.lengths) - sum(self.counts)
        return f"{sum(self.counts)} tokens" + (f" after {cached}" if cached else "")


WHOLE = ChunkShape((1536, 512), (1536, 512))
CHUNKED = ChunkShape((3072, 1024), (1536, 512))


class MeasuredPlanner(AttentionPlanner, Protocol):
    """A planner that libraries may compute for."""

    storage: BlockStorage
    window: int | None
    heads: tuple[int, int, int]  # kv_heads, query heads of each, head_dim

    def use_library(self, library: AttentionLibrary, *, for_whole: bool, for_paged: bool) -> None:
        """Compute prompts from their start, or chunks over blocks, by this library from now on."""

    def like(self, table: SequenceTable, storage: BlockStorage) -> "MeasuredPlanner":
        """Return a planner of the same heads and window, without libraries."""


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """The kernels that compute whole prompts and chunks, with the seconds of each by name, where there was a choice."""

    whole: Mapping[str, float] = field(default_factory=dict)
    paged: Mapping[str, float] = field(default_factory=dict)

    @override
    def __str__(self) -> str:
        parts = (("whole prompts", WHOLE, self.whole), ("chunks", CHUNKED, self.paged))
        measured = [f"{what} by {_described(shape, seconds)}" for what, shape, seconds in parts if seconds]
        return "; ".join(measured) or "prompts and chunks by our own kernel, the only one here"


def fastest(seconds: Mapping[str, float]) -> str:
    """Return the name of the fastest; ours where nothing was measured."""
    return min(seconds, key=lambda name: seconds[name]) if seconds else OWN


def choose_prompts(
    planner: MeasuredPlanner,
    libraries: list[AttentionLibrary],
    *,
    whole: ChunkShape = WHOLE,
    chunked: ChunkShape = CHUNKED,
) -> PromptChoice:
    """Have the planner use the fastest kernels, separately for whole prompts and for chunks over blocks."""
    by_name = {library.name: library for library in libraries}
    paged = {name: library for name, library in by_name.items() if library.paged is not None}
    choice = PromptChoice(_measure(planner, by_name, whole), _measure(planner, paged, chunked))
    for seconds, is_whole in ((choice.whole, True), (choice.paged, False)):
        name = fastest(seconds)
        if name != OWN:
            planner.use_library(by_name[name], for_whole=is_whole, for_paged=not is_whole)
    return choice


def _measure(
    planner: MeasuredPlanner, libraries: Mapping[str, AttentionLibrary], shape: ChunkShape
) -> dict[str, float]:
    """Return the seconds of our kernel and of each library that computes the same; nothing where there is none."""
    if not libraries:
        return {}
    trial = RandomChunks(planner, shape)
    own = trial.work(trial.planner())
    expected = own()
    works: dict[str, Callable[[], object]] = {OWN: own}
    for name, library in libraries.items():
        work = trial.work(trial.planner(library))
        obstacle = _obstacle(work, expected)
        if obstacle is None:
            works[name] = work
        else:
            logger.warning("%s is installed and computes no prompts here: %s", name, obstacle)
    if len(works) == 1:
        return {}
    timer = DeviceTimer(planner.storage.device, num_rounds=_ROUNDS, warm_ups=_WARM_UPS, cold_bytes=0)
    return dict(zip(works, timer.by_turns(list(works.values())), strict=True))


def _obstacle(work: Callable[[], list[Tensor]], expected: list[Tensor]) -> str | None:
    """Return why results of a library cannot be used; None: they are ours."""
    try:
        differences = [(one - other).abs().max() for one, other in zip(work(), expected, strict=True)]
        differs = float(torch.stack(differences).max())  # not a number where one of them is none
    except Exception as error:  # noqa: BLE001  (of its compiler, of a driver: a library may raise anything)
        lines = str(error).strip().splitlines() or ["no more is known"]
        return f"{type(error).__name__}: {lines[-1][:_LONGEST_REASON]}"
    # Not a number is above every tolerance, too.
    return None if differs <= _TOLERANCES[expected[0].dtype] else f"its results differ from ours by {differs:.2g}"


def _described(shape: ChunkShape, seconds: Mapping[str, float]) -> str:
    times = ", ".join(f"{name} {1e3 * each:.2f} ms" for name, each in seconds.items())
    return f"{fastest(seconds)} (measured on {shape}: {times})"


class RandomChunks:
    """Chunks over a storage of its own, of one layer, with random queries, keys and values."""

    def __init__(self, like: MeasuredPlanner, shape: ChunkShape) -> None:
        layout, device = replace(like.storage.layout, num_layers=1), like.storage.device
        self._like, self._counts = like, np.array(shape.counts)
        random = torch.Generator(device).manual_seed(0)
        self._table, num_blocks = _table_of(shape, layout.block_size)
        self._rows = np.arange(len(shape.lengths))
        self._storage = BlockStorage(layout, num_blocks, device)
        self._storage.blocks.normal_(generator=random)
        sizes = (int(self._counts.sum()), *like.heads)
        self._queries = torch.empty(sizes, dtype=self._storage.blocks.dtype, device=device).normal_(generator=random)
        self._new = self._newest()

    def planner(self, library: AttentionLibrary | None = None) -> MeasuredPlanner:
        """Return a planner of these chunks, which the library computes if there is one."""
        planner = self._like.like(self._table, self._storage)
        if library is not None:
            planner.use_library(library, for_whole=True, for_paged=library.paged is not None)
        return planner

    def work(self, planner: MeasuredPlanner) -> Callable[[], list[Tensor]]:
        """Return what computes a layer of each kind that the model has; its results are those of the last call."""
        step = planner.plan(self._rows[:0], self._rows, self._counts)
        step.bind(to_device(step.host_arrays, self._storage.device))
        kinds = (False,) if planner.window is None else (False, True)
        outs = [torch.empty_like(self._queries) for _ in kinds]

        def compute() -> list[Tensor]:
            for out, is_windowed in zip(outs, kinds, strict=True):
                step.chunks(self._queries, self._new, out, 0, is_windowed)
            return outs

        return compute

    def _newest(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of the chunks' own tokens [tokens, kv_heads * head_dim]."""
        first = self._table.num_computed[self._rows]
        blocks, offsets = self._table.places(*tokens_of(self._rows, first, self._counts))
        (slots,) = to_device([blocks * self._storage.slot_stride + offsets], self._storage.device)
        return self._storage.key_slots(0)[slots], self._storage.value_slots(0)[slots]


def _table_of(shape: ChunkShape, block_size: int) -> tuple[SequenceTable, int]:
    """Return sequences of these lengths, in rows from 0 on, their blocks in random order; and how many blocks."""
    widths = [blocks_for(length, block_size) for length in shape.lengths]
    table = SequenceTable(max_sequences=len(widths), max_context_len=max(shape.lengths), block_size=block_size)
    free = np.random.default_rng(0).permutation(sum(widths)).tolist()
    for index, (length, count, width) in enumerate(zip(*shape, widths, strict=True)):
        blocks = tuple(BlockId(free.pop()) for _ in range(width))
        row = table.add(NewSequence(RequestId(str(index)), (0,) * length, length, length - count, blocks, _ONCE))
        assert row == index, "rows of a new table are taken in order"
    return table, sum(widths)
