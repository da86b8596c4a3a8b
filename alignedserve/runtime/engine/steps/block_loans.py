"""Blocks that an engine lends to sequences whose next tokens need blocks that they lack.

A step that is launched ahead writes keys and values before the sequence's owner knows that it goes on, and has given it
blocks for them. Some of the engine's own take them meanwhile. When the step is asked for, the owner has given the real
blocks, and what was written is copied there: one slot of a sequence that decodes, blocks of a chunk. When it is
dropped, nothing is left to do. Both blocks are used on the compute stream alone, in its order, so that the same few are
lent again to the next step. Nobody outside knows of them: what owners count, forecast, move and evict are blocks of
theirs.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId
from alignedserve.runtime.attention.sequence_table import BoolArray, IntArray, SequenceTable, tokens_of
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.device_work import in_inference_mode
from alignedserve.runtime.device.streams import Stream
from alignedserve.runtime.engine.steps.chunk_guess import MOST_TOKENS, GuessedChunks
from alignedserve.runtime.kv.block_storage import BlockStorage

_LARGEST_SHARE = 32  # of the blocks, one in so many at most is the engine's own


class Loans(NamedTuple):
    """What one step was lent."""

    rows: IntArray  # of the sequence table
    columns: IntArray  # of their block tables
    blocks: IntArray


_NO_LOANS = Loans(*(np.empty(0, np.int64),) * 3)


class BlockLoans:
    """Lends the engine's own blocks to the sequences of one step at a time."""

    def __init__(self, table: SequenceTable, storage: BlockStorage, compute: Stream, blocks: Sequence[BlockId]) -> None:
        self._table = table
        self._storage = storage
        self._compute = compute
        self._blocks = np.array(blocks, np.int64)

    def lend(self, rows: IntArray, chunks: GuessedChunks) -> Loans | None:
        """Give blocks to those of these rows that lack one for their next token, and to chunks; None: too few."""
        table = self._table
        lacks = table.num_computed[rows] >= table.num_blocks[rows] * table.block_size
        if not len(chunks.rows) and not lacks.any():  # as in most steps
            return _NO_LOANS
        lacking = rows[lacks]
        columns = table.num_computed[lacking] // table.block_size
        if len(chunks.rows):
            ends = -(-(table.num_computed[chunks.rows] + chunks.counts) // table.block_size)
            held = table.num_blocks[chunks.rows]
            more_rows, more_columns = tokens_of(chunks.rows, held, np.maximum(ends - held, 0))
            lacking, columns = np.concatenate((lacking, more_rows)), np.concatenate((columns, more_columns))
        loans = Loans(lacking, columns, self._blocks[: len(lacking)])
        if len(loans.blocks) < len(loans.rows):
            return None
        table.lend_blocks(*loans)
        return loans

    def settle(self, loans: Loans, rows: IntArray) -> None:
        """Bring what a step wrote for these rows into the blocks that they have been given since.

        The table has what they have computed with it.
        """
        table = self._table
        if not len(loans.rows):
            return
        num_slots = table.num_computed[loans.rows] - loans.columns * table.block_size  # in each block, and behind it
        is_taken = np.zeros(len(table.sequences), np.bool_)
        is_taken[rows] = True
        is_written = is_taken[loans.rows] & (num_slots > 0)
        if not is_written.any():
            return
        own, columns, sources = (part[is_written] for part in loans)
        assert (columns < table.num_blocks[own]).all(), "too few blocks for the slice"
        targets, copies = table.block_tables[own, columns], self._storage.pending_copies
        copies.wait(self._compute, targets)
        self._compute.run(partial(self._copy, sources, targets, num_slots[is_written] == 1))
        copies.record(self._compute, targets)

    @in_inference_mode
    def _copy(self, sources: IntArray, targets: IntArray, has_one_slot: BoolArray) -> None:
        for is_of_these, copy in (
            (has_one_slot, self._storage.copy_first_slots),
            (~has_one_slot, self._storage.copy_whole),
        ):
            if is_of_these.any():
                copy(*to_device([sources[is_of_these], targets[is_of_these]], self._storage.device))


def num_lent_blocks(num_blocks: int, max_sequences: int, block_size: int) -> int:
    """Return how many of an engine's blocks to keep for loans: for each sequence and a chunk, a small part of all."""
    return min(max_sequences + blocks_for(MOST_TOKENS, block_size) + 1, num_blocks // _LARGEST_SHARE)
