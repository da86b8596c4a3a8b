"""Sequences that come with keys and values of more tokens than the state beside them knows.

So it is where half a block was taken from the prefix cache: the state in it stands behind its last token. Such a
sequence computes the tokens between again, in its first slice, from the last state that stands behind any of its own.
"""

import logging

import numpy as np

from alignedserve.runtime.attention.sequence_table import SequenceTable
from alignedserve.runtime.engine.steps.step_output import Slices
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.state_headers import tokens_behind_states

logger = logging.getLogger(__name__)


class LateStates:
    """Looks at each sequence that comes with cached tokens before its first slice."""

    def __init__(self, table: SequenceTable, storage: BlockStorage) -> None:
        self._table, self._copies = table, storage.pending_copies
        self._behind = tokens_behind_states(storage)
        # Rings go on from earlier tokens, too, as far as those behind these are in blocks to spare: of a step that was
        # launched ahead and dropped.
        self._num_ahead = table.block_size if storage.layout.ring_layers else 0
        self._new: set[int] = set()  # rows that have not been looked at

    def note(self, row: int) -> None:
        """Note a sequence that was added to this row, whose blocks may still be on their way."""
        sequence = self._table.sequence(row)
        self._new.discard(row)
        if sequence.num_cached and not sequence.is_trial:
            self._new.add(row)

    def caught_up(self, slices: Slices) -> Slices:
        """Return the slices with the tokens that are computed again, which do not count as computed any more."""
        if not self._new:
            return slices
        longer = []
        for request_id, num_tokens in slices:
            row, num_lost = self._table.row(request_id), 0
            if row in self._new:
                self._new.remove(row)
                num_lost = self._num_lost(row)
            if num_lost:
                logger.info("%s: computes %d tokens again, behind which there is no state", request_id, num_lost)
                self._table.num_computed[row] -= num_lost
            longer.append((request_id, num_tokens + num_lost))
        return longer

    def _num_lost(self, row: int) -> int:
        table = self._table
        self._copies.synchronize(table.blocks_of(np.array([row])))  # the host reads what they bring
        if table.state_blocks:
            behind, num_computed = int(self._behind[table.state_tables[row, 0]]), int(table.num_computed[row])
            is_known = 0 < behind <= num_computed + self._num_ahead
            return max(num_computed - behind, 0) if is_known else num_computed
        num_computed, size = int(table.num_computed[row]), table.block_size
        for column in range((num_computed - 1) // size, -1, -1):
            behind = int(self._behind[table.block_tables[row, column]])
            if column * size < behind <= min((column + 1) * size, num_computed):
                return num_computed - behind
        return num_computed
