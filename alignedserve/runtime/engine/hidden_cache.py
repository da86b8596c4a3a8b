"""Sequences whose blocks hold layer inputs instead of keys and values (Apt-Serve, section 4): half the bytes where each
query head has keys of its own, and a product more in every pass.

Their keys and values are made anew on each layer, in blocks of one layer that all layers use in turn, and are read from
there by the same attention as everybody's. On a CPU a row's products do not depend on what is computed beside it, so
they are what a cache of keys and values would hold, bit by bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from alignedserve.runtime.attention.backend import AttentionPlanner, Contexts, StepAttention
from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable
from alignedserve.runtime.device.arrays import Array
from alignedserve.runtime.kv.block_storage import BlockStorage

_NOTHING = np.empty(0, np.int64)

MakePlanner = Callable[[Contexts, BlockStorage], AttentionPlanner]


class HiddenRows(NamedTuple):
    """Of one forward pass: the sequences with a hidden cache, whose token rows come last."""

    first: int  # their first token row
    recomputed: BlockStorage  # of one layer; their new tokens' slots are of this storage
    inputs: Tensor  # [new tokens] int64: rows of BlockStorage.input_slots that take the layer inputs
    cached: Tensor  # [tokens before] int64: rows of the same that hold the earlier ones
    positions: Tensor  # [tokens before] int64
    slots: Tensor  # [tokens before] int64: rows of the recomputed keys' slots


@dataclass(frozen=True, slots=True)
class HiddenPlan:
    """Of one step, on the host. `rows` of the sequence table: those that decode, then those that compute a chunk."""

    attention: StepAttention
    rows: IntArray
    counts: IntArray
    positions: IntArray  # [new tokens]
    slots: IntArray  # [new tokens] of the recomputed keys
    arrays: tuple[Array, Array, Array, Array]  # as the tensors of HiddenRows
    recomputed: BlockStorage
    unclean_blocks: IntArray  # of it, to be zeroed before the pass

    def placed(self, first: int, tensors: Sequence[Tensor]) -> HiddenRows:
        """`tensors`: the arrays on the device."""
        if len(self.unclean_blocks):
            self.recomputed.zero_blocks(self.unclean_blocks)
        return HiddenRows(first, self.recomputed, *tensors)


class _Places:
    """Contexts as the recomputed keys and values of a step lie: sequence by sequence, from the first block on."""

    def __init__(self, table: SequenceTable) -> None:
        self.block_size = table.block_size
        self.version = 0
        self.num_computed = table.num_computed  # the table's own array
        self.block_tables = np.zeros_like(table.block_tables)

    def deal(self, rows: IntArray, lengths: IntArray) -> None:
        """Give every context its blocks."""
        self.version += 1
        first = 0
        for row, width in zip(rows.tolist(), (-(-lengths // self.block_size)).tolist(), strict=True):
            self.block_tables[row, :width] = np.arange(first, first + width)
            first += width

    def slots(self, rows: IntArray, positions: IntArray, stride: int) -> IntArray:
        """Of single tokens."""
        columns, offsets = np.divmod(positions, self.block_size)
        return self.block_tables[rows, columns] * stride + offsets


class HiddenContexts:
    """Plans the sequences of a table that have a hidden cache."""

    def __init__(
        self, table: SequenceTable, storage: BlockStorage, block_tokens: int, make_planner: MakePlanner
    ) -> None:
        """`block_tokens`: whose layer inputs a block holds. `make_planner`: of attention over a storage."""
        self._table = table
        self._block_tokens = block_tokens
        self._input_stride = storage.layout.num_layers * block_tokens
        num_blocks = storage.num_blocks * recomputed_blocks(block_tokens, table.block_size)
        self.recomputed = BlockStorage(replace(storage.layout, num_layers=1), num_blocks, storage.device)
        self.recomputed.blocks.zero_()
        self._places = _Places(table)
        self._planner = make_planner(self._places, self.recomputed)

    def plan(self, rows: IntArray, counts: IntArray) -> HiddenPlan:
        """Rows of the sequence table that compute so many tokens each."""
        table, places = self._table, self._places
        is_decode = counts == 1
        places.deal(rows, table.num_computed[rows] + counts)
        attention = self._planner.plan(rows[is_decode], rows[~is_decode], counts[~is_decode])
        rows = np.concatenate((attention.decode_rows, rows[~is_decode]))
        counts = np.concatenate((counts[is_decode], counts[~is_decode]))
        before = table.num_computed[rows]
        token_rows, positions = tokens_of(rows, before, counts)
        cached_rows, cached_positions = tokens_of(rows, np.zeros_like(before), before)
        stride = self.recomputed.slot_stride
        unclean = _NOTHING
        if self._planner.reads_unused_slots:
            unclean = places.block_tables[rows, (before + counts - 1) // table.block_size]
        return HiddenPlan(
            attention=attention,
            rows=rows,
            counts=counts,
            positions=positions,
            slots=places.slots(token_rows, positions, stride),
            arrays=(
                self._input_slots(token_rows, positions),
                self._input_slots(cached_rows, cached_positions),
                cached_positions,
                places.slots(cached_rows, cached_positions, stride),
            ),
            recomputed=self.recomputed,
            unclean_blocks=unclean,
        )

    def _input_slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        columns, offsets = np.divmod(positions, self._block_tokens)
        return self._table.block_tables[rows, columns] * self._input_stride + offsets


class MixedAttention:
    """A StepAttention: sequences with keys and values, then those whose keys and values are made anew."""

    def __init__(self, plain: StepAttention, hidden: StepAttention, first: int) -> None:
        """`first`: token row of the latter."""
        self._plain = plain
        self._hidden = hidden
        self._first = first
        self.decode_rows = plain.decode_rows
        self.padded_share = plain.padded_share
        self.host_arrays = [*plain.host_arrays, *hidden.host_arrays]

    def place(self, tensors: Sequence[Tensor]) -> None:
        """See StepAttention."""
        num_plain = len(self._plain.host_arrays)
        self._plain.place(tensors[:num_plain])
        self._hidden.place(tensors[num_plain:])

    def set_last_blocks(self, blocks: IntArray) -> None:
        """See StepAttention."""
        raise AssertionError("steps with hidden caches are not planned ahead")

    def decode(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        """See StepAttention."""
        own, others = slice(None, self._first), slice(self._first, None)
        self._plain.decode(queries[own], out[own], layer, is_windowed)
        self._hidden.decode(queries[others], out[others], 0, is_windowed)

    def chunks(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        """See StepAttention."""
        keys, values = new
        for attention, rows, of_layer in (
            (self._plain, slice(None, self._first), layer),
            (self._hidden, slice(self._first, None), 0),
        ):
            attention.chunks(queries[rows], (keys[rows], values[rows]), out[rows], of_layer, is_windowed)


def recomputed_blocks(hidden_block_tokens: int, block_size: int) -> int:
    """Blocks of one layer that the keys and values of what a block holds in layer inputs take, at most."""
    return -(-hidden_block_tokens // block_size)


def tokens_of(rows: IntArray, first: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Of `counts` tokens of each row, from `first` on: their rows and their positions, one after another."""
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(rows, counts), np.repeat(first, counts) + offsets
