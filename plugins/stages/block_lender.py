"""Blocks that the first stage's engine lends to sequences that go ahead without one for their next token.

When the token is asked for, the sequence has been given a block of its own, and the one slot that was written is copied
there, on every stage. See steps/next_step.py, which does the same on a GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from alignedserve.core.ids import BlockId
from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable
from alignedserve.runtime.kv.block_storage import BlockStorage
from plugins.stages.stage_group import StageGroup

_LARGEST_SHARE = 32  # of the blocks, one in so many at most is the engine's own


class Loan(NamedTuple):
    """A block of the engine's in the place of one that a sequence has not been given yet."""

    row: int
    column: int  # of its block table
    block: BlockId


class BlockLender:
    """Lends some blocks to the parts that are on their way."""

    def __init__(
        self, table: SequenceTable, all_blocks: BlockStorage, stages: StageGroup | None, blocks: Sequence[BlockId]
    ) -> None:
        """`blocks`: of the storage, that nothing else uses. `stages`: that have parts of blocks which `all_blocks` has
        not; None: it has all."""
        self._table, self._all_blocks, self._stages = table, all_blocks, stages
        self._free = list(blocks)

    def lend(self, rows: IntArray) -> tuple[IntArray, list[Loan]]:
        table = self._table
        lacks = table.num_computed[rows] >= table.num_blocks[rows] * table.block_size
        if not lacks.any():
            return rows, []
        lacking = rows[lacks][: len(self._free)]
        columns = table.num_computed[lacking] // table.block_size
        blocks = [self._free.pop() for _ in range(len(lacking))]
        table.lend_blocks(lacking, columns, np.array(blocks, np.int64))
        loans = list(map(Loan, lacking.tolist(), columns.tolist(), blocks))
        return (rows if len(lacking) == lacks.sum() else np.concatenate((rows[~lacks], lacking))), loans

    def take_back(self, loans: Sequence[Loan], rows: IntArray) -> None:
        """End loans, of a part that is computed or of no use; bring what it wrote for these rows into their blocks."""
        if not loans:
            return
        table, taken = self._table, set(rows.tolist())
        self._free += [loan.block for loan in loans]
        taken_loans = [loan for loan in loans if loan.row in taken]
        if not taken_loans:
            return
        assert all(loan.column < table.num_blocks[loan.row] for loan in taken_loans), "too few blocks for the slice"
        sources = [loan.block for loan in taken_loans]
        targets = [BlockId(int(table.block_tables[loan.row, loan.column])) for loan in taken_loans]
        self._all_blocks.copy_first_slots(torch.tensor(sources), torch.tensor(targets))
        if self._stages is not None:
            self._stages.settle_loans(sources, targets)


def num_stage_loans(num_blocks: int, max_running: int) -> int:
    """Return how many of a worker's blocks to keep for loans: one for each sequence, a small part of all."""
    return min(max_running, num_blocks // _LARGEST_SHARE)
