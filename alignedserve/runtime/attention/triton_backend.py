"""Attention by the Triton kernels, which read blocks in place; work is partitioned evenly over the batch.

A step's plan is a few integers per sequence, computed on the host. The arrays for a number of decodes have the same
sizes whatever their contexts, except for the block tables, which come last (`DecodeGraphs` replays with new ones).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.backend import Contexts
from alignedserve.runtime.attention.libraries import AttentionLibrary, installed_libraries
from alignedserve.runtime.attention.library_steps import (
    Chunks,
    ContextChunks,
    LibraryChunks,
    LibraryPrompts,
    OnFailure,
    is_worth_gathering,
)
from alignedserve.runtime.attention.prompt_choice import PromptChoice, PromptSetup, choose_prompts
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence, SequenceTable
from alignedserve.runtime.attention.triton_parts import ChunkRows, Decodes, GpuStep, PagedChunks
from alignedserve.runtime.attention.whole_runs import Runs, ends_of
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.layer_kind import CachedLayers
from kernels.attention import PLAIN_SCORES, ScoreForm
from kernels.gpu.attention.block_entries import BlockArrays, TableArrays, block_arrays
from kernels.gpu.attention.decode_attention import decode_tiling
from kernels.gpu.attention.latent_attention import LatentTiling, latent_tiling
from kernels.gpu.attention.prefill_attention import tiling
from kernels.gpu.blocks import BlockTables
from kernels.gpu.launching import (
    CompiledKernel,
    multiprocessor_of,
    parts_of,
    program_shared_bytes,
    programs_at_once,
)
from kernels.gpu_dispatch import can_launch, on_device

logger = logging.getLogger(__name__)

_PROGRAMS_OF_INTERPRETER = 4
_LONGEST_REASON = 300
# For larger heads, tiles of keys and values do not fit a multiprocessor's shared memory.
_MAX_HEAD_DIM = 512
NUM_TABLES = len(BlockArrays._fields)  # the last arrays of a step that decodes


class GpuPlanner:
    """An AttentionPlanner of the Triton kernels."""

    reads_unused_slots = False
    plans_ahead = True

    def __init__(
        self,
        table: Contexts,
        storage: CachedLayers,
        window: int | None,
        group: int,
        *,
        scratch_block: int | None = None,
        scores: ScoreForm = PLAIN_SCORES,
        is_chunked: bool = False,
        latent_rank: int | None = None,
        whole_runs: Mapping[int, Runs] | None = None,
        whole_in_windows: bool = False,
        num_programs: int | None = None,
    ) -> None:
        """`scratch_block`: which padding reads, of the storage that these layers are a part of; None: its own.
        `is_chunked`, `whole_runs`, `whole_in_windows`: see PagedPlanner.
        `latent_rank`: of a model whose rows are keys and values; None: another.
        `num_programs`: of one decode; None: as many as the GPU runs at once."""
        assert latent_rank is None or (window is None and scores.is_plain), "latents with windows, sinks or a cap"
        self.table = table
        self.storage = storage
        self.window = window
        self.windows: Sequence[int | None] = (None,) if window is None else (None, window)  # of its layers
        self.is_chunked = is_chunked
        self.scores = scores
        self.latent_rank = latent_rank
        self.whole_in_windows = whole_in_windows
        self._whole_runs = whole_runs if whole_runs is not None else {}
        self._arrays = TableArrays(
            table.block_tables,
            table.is_reversed,
            table.block_size,
            _scratch_block(storage) if scratch_block is None else scratch_block,
        )
        self.heads = (storage.layout.num_kv_heads, group, storage.layout.head_dim)
        at_once = num_programs or _programs(storage, group, latent_rank)
        self.num_programs = max(1, at_once // self._side_by_side())
        self._whole: AttentionLibrary | None = None
        self._paged: AttentionLibrary | None = None
        self._clears_tails = False
        self.on_failure: OnFailure = self._drop  # of a library

    def use_library(
        self, library: AttentionLibrary, *, for_whole: bool, for_paged: bool, clears_tails: bool = False
    ) -> None:
        """Compute prompts from their start, or chunks over blocks, by this library from now on.

        `clears_tails`: the slots behind a context are zeroed before the library reads its last block.
        """
        self._whole = library if for_whole else self._whole
        if for_paged:
            self._paged, self._clears_tails = library, clears_tails

    def _side_by_side(self) -> int:
        kv_heads, group, _ = self.heads
        if self.latent_rank is None:
            return kv_heads
        return parts_of(group, self.latents.heads(group))

    @property
    def latents(self) -> LatentTiling:
        """The tiling of a model with latents."""
        return latent_tiling(self.storage.blocks.dtype, self.storage.device)

    @property
    def tile(self) -> int:
        """The tokens that a decode reads at a time."""
        if self.latent_rank is not None:
            return self.latents.tokens
        blocks = self.storage.blocks
        return decode_tiling(self.heads[2], blocks.dtype, program_shared_bytes(blocks.device)).keys

    def _drop(self, library: AttentionLibrary, error: Exception) -> None:
        if library in (self._whole, self._paged):
            reason = f"{type(error).__name__}: {error}"
            logger.warning("%s failed, our own kernel goes on in its place: %s", library.name, reason[:_LONGEST_REASON])
        self._whole = None if self._whole == library else self._whole
        self._paged = None if self._paged == library else self._paged

    def plan(
        self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray, num_padding: int = 0
    ) -> GpuStep:
        """Padding reads one slot of the storage's scratch block."""
        decodes = Decodes(self, decode_rows, num_padding) if len(decode_rows) + num_padding else None
        return GpuStep(decode_rows, decodes, self._chunks(chunk_rows, chunk_counts) if len(chunk_rows) else None)

    def _chunks(self, rows: IntArray, counts: IntArray) -> Chunks:
        ends = ends_of(self._whole_runs, rows, self.table.num_computed[rows], counts)
        own = PagedChunks(self, rows, counts, ends)
        if ends is not None:
            return own
        if self._whole is not None and not self.table.num_computed[rows].any():
            return LibraryPrompts(self._whole, counts, self.window, own, self.on_failure)
        if self._paged is None or not self._may_read(rows):
            return own
        chunks = ContextChunks(self.table, rows, counts)
        if self._paged.gathers and not is_worth_gathering(chunks, self._layer_token_bytes):
            return own
        assert isinstance(self.storage, BlockStorage), "a library for some of the layers"
        return LibraryChunks(
            self._paged, self.storage, chunks, self.window, own, self.on_failure, clears_tails=self._clears_tails
        )

    def _may_read(self, rows: IntArray) -> bool:
        """Return whether a library may read the contexts of these rows: their slots go forwards.

        Where it needs numbers behind them, all must: what is zeroed there may be the other's where two sequences share
        a block from its two ends.
        """
        is_reversed = self.table.is_reversed
        return not (is_reversed if self._clears_tails else is_reversed[rows]).any()

    @property
    def _layer_token_bytes(self) -> int:
        layout = self.storage.layout
        return layout.token_bytes // layout.num_layers

    def chunk_rows(self) -> ChunkRows:
        """Return the rows that a program of chunks has, by which they are cut into tiles."""
        _, group, head_dim = self.heads
        if self.latent_rank is not None:
            return ChunkRows(self.latents.heads(group), self.latents.query_rows)
        blocks = self.storage.blocks
        return ChunkRows(group, tiling(head_dim, blocks.dtype, program_shared_bytes(blocks.device)).query_rows)

    def decoded_arrays(self, rows: IntArray, lengths: IntArray) -> BlockArrays:
        """Return the arrays of contexts of sequences that decode; lengths beyond `rows` are padding."""
        return block_arrays(self._arrays, rows, lengths)

    def block_arrays(self, rows: IntArray, lengths: IntArray) -> BlockArrays:
        """Return the arrays of contexts that chunks read, the entries of their block tables last."""
        return block_arrays(self._arrays, rows, lengths)

    def tables(self, entries: Tensor, starts: Tensor, is_reversed: Tensor) -> Sequence[BlockTables]:
        """Return the block tables that these arrays make."""
        return [BlockTables(entries, starts, is_reversed)]

    def place_of(self, layer: int) -> tuple[int, int]:
        """Return which of the tables a layer reads, and its place in the blocks."""
        return 0, layer


def gpu_attention_works(layout: BlockLayout, group: int, device: torch.device, latent_rank: int | None = None) -> bool:
    """Return whether the kernels run here for these heads, by a trial on two short sequences; log once if not."""
    name = f"attention ({layout.dtype}, {group} query heads of {layout.head_dim} per key head)"
    if latent_rank is not None:
        name = f"attention ({layout.dtype}, {group} query heads over latents of {latent_rank})"
    return can_launch(name, lambda: _trial_launch(layout, group, device, latent_rank))


def choose_prompt_attention(planner: GpuPlanner, rings: GpuPlanner | None = None) -> PromptChoice:
    """Have the planner use the fastest kernels for whole prompts and for chunks: ours, or those of a library.

    `rings`: the planner of layers that have some, whose chunks no library reads.
    """
    storage, window = planner.storage, planner.window if rings is None else rings.window
    assert isinstance(storage, BlockStorage), "a library for some of the layers"
    choice = prompt_choice(storage.layout, storage.num_blocks, planner.heads[1], window, storage.device)
    by_name = {library.name: library for library in installed_libraries(storage.layout, storage.device)}
    if choice.for_whole in by_name:
        for one in (planner,) if rings is None else (planner, rings):
            one.use_library(by_name[choice.for_whole], for_whole=True, for_paged=False)
    if choice.for_paged in by_name:
        planner.use_library(
            by_name[choice.for_paged], for_whole=False, for_paged=True, clears_tails=choice.clears_tails
        )
    return choice


def prompt_choice(
    layout: BlockLayout, num_blocks: int, group: int, window: int | None, device: torch.device
) -> PromptChoice:
    """Return which kernels compute prompts and chunks over so many blocks, as known or found out now."""
    names = [library.name for library in installed_libraries(layout, device)]
    return choose_prompts(PromptSetup(str(device), layout, num_blocks, group, window), names)


class _OneStep:
    def __init__(self, layout: BlockLayout, group: int, device: torch.device, latent_rank: int | None) -> None:
        prompt_len = 2
        width = blocks_for(prompt_len, layout.block_size)
        storage = BlockStorage(replace(layout, num_layers=1), width + 1, device)
        table = SequenceTable(max_sequences=2, max_context_len=prompt_len, block_size=layout.block_size)
        blocks = [BlockId(block) for block in range(width + 1)]
        once = SamplingParams(max_tokens=1)
        decoding = NewSequence(RequestId("decode"), (0, 0), 1, 1, tuple(blocks[:1]), once)
        prompt = NewSequence(RequestId("prompt"), (0,) * prompt_len, prompt_len, 0, tuple(blocks[1:]), once)
        rows = np.array([table.add(decoding), table.add(prompt)])
        planner = GpuPlanner(table, storage, None, group, latent_rank=latent_rank, num_programs=1)
        self._step = planner.plan(rows[:1], rows[1:], np.array([prompt_len]))
        self._step.bind(to_device(self._step.host_arrays, device))
        shape = (1 + prompt_len, *planner.heads)
        dtype = torch.bfloat16 if layout.has_scales else storage.blocks.dtype
        self.queries = torch.zeros(shape, dtype=dtype, device=device)

    def compute(self) -> None:
        out = torch.empty_like(self.queries)
        self._step.decode(self.queries, out, 0, False)
        self._step.chunks(self.queries, (out, out), out, 0, False)

    def decode_kernel(self) -> CompiledKernel | None:
        decodes = self._step.decodes
        assert decodes is not None, "a step without decodes"
        return decodes.run(self.queries[:1], torch.empty_like(self.queries[:1]), 0, False)


def _trial_launch(layout: BlockLayout, group: int, device: torch.device, latent_rank: int | None) -> None:
    if latent_rank is None and layout.head_dim > _MAX_HEAD_DIM:
        raise ValueError(f"no kernel for heads of {layout.head_dim} elements, only up to {_MAX_HEAD_DIM}")
    with on_device(device):
        _OneStep(layout, group, device, latent_rank).compute()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _scratch_block(storage: CachedLayers) -> int:
    return storage.scratch_block if isinstance(storage, BlockStorage) and storage.has_scratch else -1


def _programs(storage: CachedLayers, group: int, latent_rank: int | None) -> int:
    if storage.device.type != "cuda":
        return _PROGRAMS_OF_INTERPRETER
    with on_device(storage.device):
        kernel = _OneStep(storage.layout, group, storage.device, latent_rank).decode_kernel()
    side_by_side = 1 if kernel is None else programs_at_once(kernel, multiprocessor_of(storage.device))
    return int(torch.cuda.get_device_properties(storage.device).multi_processor_count) * side_by_side
