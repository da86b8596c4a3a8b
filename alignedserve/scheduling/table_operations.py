"""Operations on many rows of a table that every iteration needs, by the native kernels where they are built.

A dozen small operations of numpy take longer than the arithmetic on a few hundred rows. The plain forms here give the
same to the last bit.
"""

from collections.abc import Collection

import numpy as np

from alignedserve.costmodel.model import CostModel
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


_MIXING_TOLERANCE = 0.1  # about the error of a learned cost model


def decode_work(table: RequestTable) -> IterationWork:
    work = IterationWork()
    on_device = (table.num_remaining == 1) & (table.num_blocks > 0) & (table.num_swapped == 0)
    note_decodes(work, table, np.flatnonzero(on_device))
    return work


def decode_s(table: RequestTable, costs: CostModel) -> float | None:
    """Return the time of an iteration of all decodes here; None: there are none."""
    work = decode_work(table)
    return costs.iteration_s(work) if work.num_decodes else None


def is_mixing_cheaper(table: RequestTable, costs: CostModel, context_lens: Collection[int]) -> bool:
    """Return whether these contexts can join the running iteration without a straggler, by the cost model.

    No, if the iteration would take longer than as many contexts of equal length: a short context that joins a straggler
    costs nothing more, but is as late. Nor if the new ones add more than their share of an iteration of their length.
    """
    return is_cheap_beside(decode_work(table), costs, context_lens)


def is_cheap_beside(here: IterationWork, costs: CostModel, context_lens: Collection[int]) -> bool:
    """Return the same for decodes that are `here`."""
    both = here.copy()
    both.add_decodes(len(context_lens), sum(context_lens), max(context_lens))
    equal = both.copy()
    equal.max_decode_context_len = -(-both.decode_context_len // both.num_decodes)
    both_s, equal_s, num_others = costs.iteration_s(both), costs.iteration_s(equal), len(context_lens)
    if both_s > (1.0 + _MIXING_TOLERANCE) * equal_s:
        return False
    like, empty = both.copy(), IterationWork()
    like.decode_context_len = both.num_decodes * sum(context_lens) // num_others
    like.max_decode_context_len = -(-sum(context_lens) // num_others)
    empty.add_decode(0)
    share_s = (costs.iteration_s(like) - costs.iteration_s(empty)) * num_others / both.num_decodes
    return both_s - costs.iteration_s(here) <= (1.0 + _MIXING_TOLERANCE) * share_s


def num_decodes_within(costs: CostModel, work: IterationWork, table: RequestTable, rows: Ints, budget_s: float) -> int:
    """Count how many of these decodes, from the front, keep the iteration within the time; by bisection."""
    if not len(rows) or budget_s == np.inf:
        return len(rows)

    def fits(count: int) -> bool:
        trial = work.copy()
        note_decodes(trial, table, rows[:count])
        return costs.iteration_s(trial) <= budget_s

    if fits(len(rows)):
        return len(rows)
    below, above = 0, len(rows)
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below
