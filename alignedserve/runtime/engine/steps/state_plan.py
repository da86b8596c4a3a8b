"""Plans where the sequences of a step read their states, and where they leave them: see `kernels.states.state_rows`."""

from collections.abc import Sequence

import numpy as np

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable, tokens_of
from alignedserve.runtime.kv.block_storage import BlockStorage
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
    that of 32 tokens there, and that of 35 in block 2.
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

    Example: a sequence with 30 tokens computed goes on by 40, and its states behind 64 are kept. It reads its own, and
    leaves those of 64 tokens in the blocks for these, and those of 70 in its own.
    """
    before = table.num_computed[rows]
    firsts, afters = np.cumsum(counts) - counts, before + counts
    own = table.state_tables[rows].T.copy()  # [columns, sequences]
    sources = np.where(before > 0, own, NO_BLOCK)
    if not table.kept_states:
        numbers = np.arange(len(rows))
        return _in_columns(firsts, sources, own, StateParts(firsts + counts - 1, own[0], afters, numbers))
    parts: list[tuple[int, int, Sequence[int]]] = []  # sequence, tokens of its context, blocks
    for index, (row, first, last) in enumerate(zip(rows.tolist(), before.tolist(), afters.tolist(), strict=True)):
        kept = sorted(table.kept_states.pop(row, ()))
        parts += [(index, edge.num_tokens, edge.block_ids) for edge in kept if first < edge.num_tokens <= last]
        parts.append((index, last, table.state_tables[row]))
    sequences = np.array([part[0] for part in parts])
    num_tokens = np.array([part[1] for part in parts])
    targets = np.array([part[2] for part in parts]).T.copy()  # [columns, parts]
    token_rows = firsts[sequences] + num_tokens - before[sequences] - 1
    return _in_columns(firsts, sources, targets, StateParts(token_rows, targets[0], num_tokens, sequences))


def _in_columns(firsts: IntArray, sources: IntArray, targets: IntArray, parts: StateParts) -> StateRows:
    further = [StateColumn(*blocks) for blocks in zip(sources[1:], targets[1:], strict=True)]
    return StateRows(firsts, sources[0], parts, further)
