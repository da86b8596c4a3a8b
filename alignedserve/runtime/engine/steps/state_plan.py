"""Plans where the sequences of a step read their states, and where they leave them: see `kernels.states.state_rows`."""

import numpy as np

from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable, tokens_of
from kernels.states.state_rows import NO_BLOCK, StateParts, StateRows


def plan_states(table: SequenceTable, rows: IntArray, counts: IntArray) -> StateRows:
    """Plan rows of the table that compute `counts` tokens each: a state is left at the end of each block, and of all.

    Example: blocks of 16; a sequence with 30 tokens computed goes on by 5. It reads the state in its block 1, leaves
    that of 32 tokens there, and that of 35 in block 2.
    """
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
