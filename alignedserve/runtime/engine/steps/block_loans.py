"""Blocks that an engine lends to sequences whose next token needs a block that they lack.

A step that is launched ahead writes keys and values before the sequence's owner knows that it goes on, and has given it
a block for them. One of the engine's own takes them meanwhile. When the step is asked for, the owner has given the real
block, and the one slot that was written is copied there; when it is dropped, nothing is left to do. Both blocks are
used on the compute stream alone, in its order, so that the same few are lent again to the next step. Nobody outside
knows of them: what owners count, forecast, move and evict are blocks of theirs.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from alignedserve.core.ids import BlockId
from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.streams import Stream
from alignedserve.runtime.kv.block_storage import BlockStorage

_LARGEST_SHARE = 32  # of the blocks, one in so many at most is the engine's own


class Loans(NamedTuple):
    """What one step was lent."""

    rows: IntArray  # of the sequence table
    columns: IntArray  # of their block tables
    blocks: IntArray


class BlockLoans:
    """Lends the engine's own blocks to the sequences of one step at a time."""

    def __init__(self, table: SequenceTable, storage: BlockStorage, compute: Stream, blocks: Sequence[BlockId]) -> None:
        """`blocks`: of the storage, that nothing else uses."""
        self._table = table
        self._storage = storage
        self._compute = compute
        self._blocks = np.array(blocks, np.int64)

    def lend(self, rows: IntArray) -> Loans | None:
        """Give a block to those of these rows that lack one for their next token; None: there are too few."""
        table = self._table
        columns = table.num_computed[rows] // table.block_size
        lacks = columns >= table.num_blocks[rows]
        loans = Loans(rows[lacks], columns[lacks], self._blocks[: np.count_nonzero(lacks)])
        if len(loans.blocks) < len(loans.rows):
            return None
        table.lend_blocks(loans.rows, loans.columns, loans.blocks)
        return loans

    def settle(self, loans: Loans, rows: IntArray) -> None:
        """Bring what a step wrote for these rows into the blocks that they have been given since."""
        table, goes_on = self._table, np.isin(loans.rows, rows)
        if not goes_on.any():
            return
        own, columns, sources = (part[goes_on] for part in loans)
        assert (columns < table.num_blocks[own]).all(), "too few blocks for the slice"
        targets, copies = table.block_tables[own, columns], self._storage.pending_copies
        copies.wait(self._compute, targets)
        self._compute.run(torch.inference_mode()(partial(self._copy, sources, targets)))
        copies.record(self._compute, targets)

    def _copy(self, sources: IntArray, targets: IntArray) -> None:
        self._storage.copy_first_slots(*to_device([sources, targets], self._storage.device))


def num_lent_blocks(num_blocks: int, max_sequences: int) -> int:
    """Return how many of an engine's blocks to keep for loans: one for each sequence, but a small part of all."""
    return min(max_sequences, num_blocks // _LARGEST_SHARE)
