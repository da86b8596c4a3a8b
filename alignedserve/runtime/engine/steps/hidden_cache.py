"""Planning of sequences whose blocks hold layer inputs instead of keys and values (Apt-Serve, section 4).

A hidden cache takes half the bytes where each query head has its own keys, and one more product in every pass. Keys and
values are recomputed on each layer (`HiddenPass`), in blocks of one layer that all layers use in turn, from which the
usual attention reads them. On a CPU a row's products do not depend on the other rows, so the recomputed values equal
those that a cache of keys and values would hold, bit by bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from alignedserve.core.block_layout import recomputed_blocks
from alignedserve.runtime.attention.backend import AttentionPlanner, Contexts, StepAttention
from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable, tokens_of
from alignedserve.runtime.device.arrays import Array
from alignedserve.runtime.engine.forward.forward_batch import HiddenRows
from alignedserve.runtime.kv.block_storage import BlockStorage


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Slices of sequences: decodes first, then chunks; their tokens lie one after another."""

    attention: StepAttention
    rows: IntArray  # [slices] rows of the sequence table
    counts: IntArray  # [slices] tokens of each
    token_rows: IntArray  # [tokens] rows of the sequence table
    positions: IntArray  # [tokens]
    slots: IntArray  # [tokens], see ForwardBatch


_NOTHING = np.empty(0, np.int64)

MakePlanner = Callable[[Contexts, BlockStorage], AttentionPlanner]


@dataclass(frozen=True, slots=True)
class HiddenPlan:
    """The slices of one step whose sequences have a hidden cache, on the host."""

    slices: SlicePlan  # slots: of the recomputed keys
    arrays: tuple[Array, Array, Array, Array]  # as the tensors of HiddenRows
    recomputed: BlockStorage
    unclean_blocks: IntArray  # of it, to be zeroed before the pass

    def after(self, plain: SlicePlan) -> SlicePlan:
        slices = self.slices
        return SlicePlan(
            MixedAttention(plain.attention, slices.attention, len(plain.slots)),
            np.concatenate((plain.rows, slices.rows)),
            np.concatenate((plain.counts, slices.counts)),
            np.concatenate((plain.token_rows, slices.token_rows)),
            np.concatenate((plain.positions, slices.positions)),
            np.concatenate((plain.slots, slices.slots)),
        )

    def to_rows(self, num_tokens: int, tensors: Sequence[Tensor]) -> HiddenRows:
        """Build the rows at the end of a batch of `num_tokens`. `tensors`: the arrays on the device."""
        if len(self.unclean_blocks):
            self.recomputed.zero_blocks(self.unclean_blocks)
        return HiddenRows(num_tokens - len(self.slices.slots), self.recomputed, *tensors)


class _RecomputedContexts:
    def __init__(self, table: SequenceTable) -> None:
        self.block_size = table.block_size
        self.version = 0
        self.num_computed = table.num_computed  # the table's own array
        self.block_tables = np.zeros_like(table.block_tables)
        self.is_reversed = np.zeros_like(table.is_reversed)

    def assign_blocks(self, rows: IntArray, lengths: IntArray) -> None:
        self.version += 1
        first = 0
        for row, width in zip(rows.tolist(), (-(-lengths // self.block_size)).tolist(), strict=True):
            self.block_tables[row, :width] = np.arange(first, first + width)
            first += width

    def slots(self, rows: IntArray, positions: IntArray, stride: int) -> IntArray:
        columns, offsets = np.divmod(positions, self.block_size)
        return self.block_tables[rows, columns] * stride + offsets


class HiddenContexts:
    """Plans the sequences of a table that have a hidden cache."""

    def __init__(
        self, table: SequenceTable, storage: BlockStorage, block_tokens: int, make_planner: MakePlanner
    ) -> None:
        """`block_tokens`: tokens whose layer inputs a block holds. `make_planner`: makes attention planners."""
        self._table = table
        self._block_tokens = block_tokens
        self._input_stride = storage.layout.num_layers * block_tokens
        num_blocks = storage.num_blocks * recomputed_blocks(block_tokens, table.block_size)
        self.recomputed = BlockStorage(replace(storage.layout, num_layers=1), num_blocks, storage.device)
        self.recomputed.blocks.zero_()
        self._contexts = _RecomputedContexts(table)
        self._planner = make_planner(self._contexts, self.recomputed)

    def plan(self, rows: IntArray, counts: IntArray) -> HiddenPlan:
        table, contexts = self._table, self._contexts
        is_decode = counts == 1
        contexts.assign_blocks(rows, table.num_computed[rows] + counts)
        attention = self._planner.plan(rows[is_decode], rows[~is_decode], counts[~is_decode])
        rows = np.concatenate((attention.decode_rows, rows[~is_decode]))
        counts = np.concatenate((counts[is_decode], counts[~is_decode]))
        before = table.num_computed[rows]
        token_rows, positions = tokens_of(rows, before, counts)
        cached_rows, cached_positions = tokens_of(rows, np.zeros_like(before), before)
        stride = self.recomputed.slot_stride
        unclean = _NOTHING
        if self._planner.reads_unused_slots:
            unclean = contexts.block_tables[rows, (before + counts - 1) // table.block_size]
        return HiddenPlan(
            slices=SlicePlan(
                attention, rows, counts, token_rows, positions, contexts.slots(token_rows, positions, stride)
            ),
            arrays=(
                self._input_slots(token_rows, positions),
                self._input_slots(cached_rows, cached_positions),
                cached_positions,
                contexts.slots(cached_rows, cached_positions, stride),
            ),
            recomputed=self.recomputed,
            unclean_blocks=unclean,
        )

    def _input_slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        columns, offsets = np.divmod(positions, self._block_tokens)
        return self._table.block_tables[rows, columns] * self._input_stride + offsets


class MixedAttention:
    """A StepAttention over sequences with keys and values, then those with a hidden cache."""

    def __init__(self, plain: StepAttention, hidden: StepAttention, first: int) -> None:
        self._plain = plain
        self._hidden = hidden
        self._first = first
        self.decode_rows = plain.decode_rows
        self.padded_share = plain.padded_share
        self.host_arrays = [*plain.host_arrays, *hidden.host_arrays]

    def bind(self, tensors: Sequence[Tensor]) -> None:
        num_plain = len(self._plain.host_arrays)
        self._plain.bind(tensors[:num_plain])
        self._hidden.bind(tensors[num_plain:])

    def set_last_blocks(self, blocks: IntArray) -> None:
        raise AssertionError("steps with hidden caches are not planned ahead")

    def decode(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        plain_rows, hidden_rows = slice(None, self._first), slice(self._first, None)
        self._plain.decode(queries[plain_rows], out[plain_rows], layer, is_windowed)
        self._hidden.decode(queries[hidden_rows], out[hidden_rows], 0, is_windowed)

    def chunks(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        keys, values = new
        for attention, rows, of_layer in (
            (self._plain, slice(None, self._first), layer),
            (self._hidden, slice(self._first, None), 0),
        ):
            attention.chunks(queries[rows], (keys[rows], values[rows]), out[rows], of_layer, is_windowed)
