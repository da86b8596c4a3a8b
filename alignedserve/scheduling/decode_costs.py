"""Predicted times of the decodes of a worker."""

from collections.abc import Collection

import numpy as np

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.table import Ints, RequestTable
from alignedserve.scheduling.table_operations import note_decodes

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
    """Return whether decodes of these contexts cost no more in the running iteration than in one of equal lengths.

    By the cost model: always if attention costs the sum of the contexts; if the longest one is a straggler, only for
    similar contexts. The comparison is with equal lengths, not with the lengths given: otherwise two batches with
    stragglers of their own would be mixed, and never be separated again.
    """
    return is_cheap_beside(decode_work(table), costs, context_lens)


def is_cheap_beside(here: IterationWork, costs: CostModel, context_lens: Collection[int]) -> bool:
    """Return the same for decodes that are `here`."""
    among_like = IterationWork()
    num_others, sum_others = len(context_lens), sum(context_lens)
    among_like.add_decodes(num_others, sum_others, -(-sum_others // num_others))
    both = here.copy()
    both.add_decodes(num_others, sum_others, max(context_lens))
    empty = IterationWork()
    empty.add_decode(0)
    added_s = costs.iteration_s(both) - costs.iteration_s(here)
    own_s = costs.iteration_s(among_like) - costs.iteration_s(empty)
    return added_s <= (1.0 + _MIXING_TOLERANCE) * own_s


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
