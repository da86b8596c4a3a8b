"""Operations on many rows of a table that every iteration needs, by the native kernels where they are built.

A dozen small operations of numpy take longer than the arithmetic on a few hundred rows. The plain forms here give the
same to the last bit.
"""

import numpy as np

from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.scheduling.table import Bools, Ints, RequestTable
from kernels.cpu import request_table as native
from kernels.cpu.request_table import BlockSizes, FittingDecodes


def note_decodes(work: IterationWork, table: RequestTable, rows: Ints) -> None:
    """Add decodes of these rows to `work`."""
    work.add_decodes(len(rows), *_decode_sums(table, rows))


def _decode_sums(table: RequestTable, rows: Ints) -> tuple[int, int, int, int]:
    """Return the context lengths of these rows added up, the longest, the sum of those with a hidden cache, and how
    many rows have a grammar."""
    if table.has_kernels:
        return native.decode_sums(table.columns, len(table), rows)
    context_len = table.prompt_len[rows] + table.num_generated[rows]
    hidden_len = int(context_len @ table.is_hidden[rows])
    num_constrained = int(np.count_nonzero(table.is_constrained[rows]))
    return int(np.add.reduce(context_len)), int(context_len.max(initial=0)), hidden_len, num_constrained


def fitting_decodes(
    table: RequestTable, memory: DeviceMemory, rows: Ints, *, at_most: int, num_free: int
) -> FittingDecodes:
    """Add up the first of these decodes that `num_free` blocks hold with one more token each."""
    if table.has_kernels and not memory.state_blocks:
        return native.fitting_decodes(
            table.columns, len(table), rows, at_most=at_most, num_free=num_free, sizes=_sizes(memory)
        )
    wanted = memory.blocks_for_each(table.num_cached[rows] + 1, is_hidden=table.is_hidden[rows])
    taken = np.cumsum(np.maximum(wanted - table.num_blocks[rows], 0))
    count = max(min(int(np.searchsorted(taken, num_free, side="right")), at_most), 0)
    num_blocks = int(taken[count - 1]) if count else 0
    return FittingDecodes(count, num_blocks, *_decode_sums(table, rows[:count]))


def growing_rows(table: RequestTable, memory: DeviceMemory, rows: Ints, num_tokens: Ints) -> list[bool]:
    if table.has_kernels and not memory.state_blocks:
        grows = native.growing_rows(table.columns, len(table), rows, num_tokens, _sizes(memory))
        assert grows is not None, "computes tokens that are not known yet"
        return grows
    assert (num_tokens <= table.num_remaining[rows]).all(), "computes tokens that are not known yet"
    wanted = memory.blocks_for_each(table.num_cached[rows] + num_tokens, is_hidden=table.is_hidden[rows])
    has_grown: Bools = (wanted > table.num_blocks[rows]) | (table.num_swapped[rows] > 0)
    grown: list[bool] = has_grown.tolist()
    return grown


def note_completed(table: RequestTable, rows: Ints, num_tokens: Ints, *, now: float, duration_s: float) -> Bools:
    if table.has_kernels:
        return native.note_completed(table.columns, len(table), rows, num_tokens, now=now, duration_s=duration_s)
    table.num_cached[rows] += num_tokens
    table.service_s[rows] += duration_s
    table.last_run_s[rows] = now
    has_sampled: Bools = table.num_remaining[rows] == 0
    sampled = rows[has_sampled]
    table.num_generated[sampled] += 1
    first = sampled[np.isnan(table.first_token_s[sampled])]
    table.first_token_s[first] = now
    table.last_token_s[sampled] = now
    table.waits_since_s[sampled] = now
    return has_sampled


def _sizes(memory: DeviceMemory) -> BlockSizes:
    return BlockSizes(memory.block_size, memory.hidden_ratio or 0.0)
