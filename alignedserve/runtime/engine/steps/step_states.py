"""Plans where the sequences of a step read their states, and where they leave them: see `kernels.states.state_rows`."""

import logging
from collections.abc import Sequence

import numpy as np

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable, tokens_of
from alignedserve.runtime.engine.steps.step import Slices
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.state_headers import tokens_behind_states
from kernels.states.device_rows import DeviceStatePlan, state_kernels
from kernels.states.state_rows import NO_BLOCK, StateColumn, StateParts, StateRows


class StatePlanner:
    """Plans the states of the passes over one storage."""

    def __init__(self, table: SequenceTable, storage: BlockStorage) -> None:
        """Raises ConfigError where nothing computes states on the storage's device."""
        self._table, self._storage = table, storage
        self._kernels = state_kernels(storage.device)  # None: those of a CPU
        if self._kernels is None and storage.device.type != "cpu":
            reason = "the kernels of layers with a state do not run on this GPU, as the log says"
            raise ConfigError(f"{reason}; set engine.device=cpu")

    def plan(self, rows: IntArray, counts: IntArray, num_padding: int = 0) -> StateRows | DeviceStatePlan:
        planned = plan_states(self._table, rows, counts)
        if num_padding:
            planned = planned.padded(num_padding, self._storage.scratch_block)
        return planned if self._kernels is None else DeviceStatePlan(self._kernels, planned)


def plan_states(table: SequenceTable, rows: IntArray, counts: IntArray) -> StateRows:
    """Plan rows of the table that compute `counts` tokens each: a state is left at the end of each block, and of all.

    Example: blocks of 16; a sequence with 30 tokens computed goes on by 5. It reads the state in its block 1, leaves
    the state of 32 tokens there, and the state of 35 tokens in block 2.
    """
    if table.state_blocks:
        return _plan_apart(table, rows, counts)
    size, before = table.block_size, table.num_computed[rows]
    sources = np.where(before > 0, table.block_tables[rows, np.maximum(before - 1, 0) // size], NO_BLOCK)
    firsts = np.cumsum(counts) - counts
    first_columns, ends = before // size, before + counts
    num_parts = (ends - 1) // size - first_columns + 1
    sequences = np.repeat(np.arange(len(rows)), num_parts)
    part_rows, columns = tokens_of(rows, first_columns, num_parts)
    num_tokens = np.minimum((columns + 1) * size, ends[sequences])
    token_rows = firsts[sequences] + num_tokens - before[sequences] - 1
    return StateRows(
        firsts, sources, StateParts(token_rows, table.block_tables[part_rows, columns], num_tokens, sequences)
    )


def _plan_apart(table: SequenceTable, rows: IntArray, counts: IntArray) -> StateRows:
    """Plan rows whose states have blocks of their own: a state is left there, and at edges where it is to be kept.

    Example: a sequence with 30 tokens computed goes on by 40, and its states behind 64 are kept. It reads its own
    states, leaves the states of 64 tokens in the blocks that keep them, and the states of 70 tokens in its own.
    """
    before = table.num_computed[rows]
    firsts, afters = np.cumsum(counts) - counts, before + counts
    blocks = table.state_tables[rows].T.copy()  # [columns, sequences]
    sources = np.where(before > 0, blocks, NO_BLOCK)
    if not table.kept_states:
        numbers = np.arange(len(rows))
        return _in_columns(firsts, sources, blocks, StateParts(firsts + counts - 1, blocks[0], afters, numbers))
    parts: list[tuple[int, int, Sequence[int]]] = []  # sequence, tokens of its context, blocks
    for index, (row, first, last) in enumerate(zip(rows.tolist(), before.tolist(), afters.tolist(), strict=True)):
        edges = sorted(table.kept_states.pop(row, ()))
        parts += [(index, edge.num_tokens, edge.block_ids) for edge in edges if first < edge.num_tokens <= last]
        parts.append((index, last, table.state_tables[row]))
    sequences = np.array([part[0] for part in parts])
    num_tokens = np.array([part[1] for part in parts])
    targets = np.array([part[2] for part in parts]).T.copy()  # [columns, parts]
    token_rows = firsts[sequences] + num_tokens - before[sequences] - 1
    return _in_columns(firsts, sources, targets, StateParts(token_rows, targets[0], num_tokens, sequences))


def _in_columns(firsts: IntArray, sources: IntArray, targets: IntArray, parts: StateParts) -> StateRows:
    further = [StateColumn(*blocks) for blocks in zip(sources[1:], targets[1:], strict=True)]
    return StateRows(firsts, sources[0], parts, further)


logger = logging.getLogger(__name__)


class LateStates:
    """Looks at each sequence that comes with cached tokens before its first slice.

    It may come with keys and values of more tokens than the state beside them knows: half a block of the prefix cache
    has its state behind its last token. Such a sequence computes the tokens between again, in its first slice.
    """

    def __init__(self, table: SequenceTable, storage: BlockStorage) -> None:
        self._table, self._copies = table, storage.pending_copies
        self._behind = tokens_behind_states(storage)
        # Rings go on from earlier tokens, too, as far as those behind these are in blocks to spare: of a step that was
        # launched ahead and dropped.
        self._num_ahead = table.block_size if storage.layout.ring_layers else 0
        self._new: set[int] = set()  # rows that have not been looked at

    def note(self, row: int) -> None:
        sequence = self._table.sequence(row)
        self._new.discard(row)
        if sequence.num_cached and not sequence.is_trial:
            self._new.add(row)

    def caught_up(self, slices: Slices) -> Slices:
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
