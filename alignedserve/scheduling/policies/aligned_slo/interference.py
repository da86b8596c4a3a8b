"""The bound on interference: by how much best effort may prolong the gaps of real-time requests.

While a real-time request waits for its next token, an iteration takes at most `bound` times what its real-time part
takes alone, by the cost model; copies of best-effort caches count like computing. Best effort has its floor all the
same, as a share of the time: of what it is owed at most one unit is kept, the least that it can compute at once (a
token of the first that waits, or the copy of its cache). So where the bound leaves less than the floor, the floor wins,
and an iteration beyond the bound is so by no more than one unit and its share.

    owed  <- min(owed, unit) + floor / (1 - floor) * alone
    until  = max(min(what objectives allow, bound * alone), alone + owed)
    owed  <- max(owed - (the iteration - alone), 0)

A separate decode worker gets its requests between two of their tokens. One that comes during an iteration of documents
alone waits for its end, in one gap. So while such requests come, these iterations take at most `2 * usual`, where
`usual` is the mean of `alone`.

Example: the bound is 1.1, the floor 5 %. Four chats take 20 ms alone, each document 1 ms more: two documents decode
beside them, as 22 ms are allowed. With 1.02 none fits into 20.4 ms; the floor owes 1.05 ms, so one does.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np

from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policies.aligned_slo.floor import behind
from alignedserve.scheduling.policies.aligned_slo.forecast import BEST_EFFORT, PRESSING, STARVING, Group, rows_of
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.table import RequestTable
from kernels.cpu.request_table import RowForecasts

_GAPS_LOST = 2.0  # of those that the real-time part alone would make
_WEIGHT = 1 / 16  # of the latest real-time part in their mean
DOCUMENTS = Group.of(STARVING, PRESSING, BEST_EFFORT)  # once no real-time request is starving


class Packing(Protocol):
    """An iteration in construction."""

    @property
    def work(self) -> IterationWork:
        """As packed so far."""

    def add_decodes(self, group: Group, budget_s: float) -> None:
        """Add next tokens within this time."""

    def add_prompts(self, group: Group, budget_s: float) -> None:
        """Add prompts, and caches from the host, within this time."""

    def plan(self) -> IterationPlan:
        """Return the plan."""


def has_gaps(table: RequestTable) -> bool:
    """Return whether a real-time request waits for a token after its first one."""
    return bool(np.any(table.is_real_time & (table.num_generated > 0)))


def without_starving_chat(table: RequestTable, rows: RowForecasts) -> RowForecasts:
    """Return the forecasts with real-time requests that have waited too long first in the rank of their objectives.

    They are part of what best effort is measured against, and so do not go with it.
    """
    starving = np.flatnonzero((rows.rank == STARVING) & table.is_real_time)
    return behind(rows, starving) if len(starving) else rows


class Interference:
    """Knows what best effort is owed, and whether requests come here between two of their tokens."""

    def __init__(self, bound: float, floor: float) -> None:
        """`bound`: at least 1. `floor`: the share of best effort in the time, at least 0 and below 1."""
        self._bound = bound
        self._owed_share = floor / (1.0 - floor)
        self._owed_s = 0.0
        self._usual_s: float | None = None  # mean of the real-time parts
        self._came_s = -np.inf  # when a request last came between two of its tokens

    def without_gaps_s(self, now: float, memory_s: float) -> float:
        """Return how long an iteration may take now that no gap runs: inf unless requests came in theirs lately."""
        if self._usual_s is None or now - self._came_s > memory_s:
            return np.inf
        return _GAPS_LOST * self._usual_s

    def copies_s(self, view: WorkerView, decodes: IterationWork) -> float:
        """Return how long copies that make room for others may take beside these real-time decodes."""
        return self._bound * view.costs.iteration_s(decodes)

    def pack(self, packing: Packing, view: WorkerView, rows: RowForecasts, allowed_s: float) -> IterationPlan:
        """Add best effort to the packed real-time part, and return the plan. `allowed_s`: by objectives."""
        alone_s = _alone_s(packing.work, view)
        self._usual_s = alone_s if self._usual_s is None else self._usual_s + _WEIGHT * (alone_s - self._usual_s)
        if _has_newcomers(view.table):
            self._came_s = view.now
        unit_s = _unit_s(packing.work, view, rows) - alone_s
        share_s = self._owed_share * alone_s
        self._owed_s = min(self._owed_s, unit_s) + share_s
        until_s = max(min(allowed_s, self._bound * alone_s), alone_s + self._owed_s)
        packing.add_decodes(DOCUMENTS, until_s)
        packing.add_prompts(DOCUMENTS, until_s)
        plan = packing.plan()
        self._owed_s = max(self._owed_s - max(view.costs.iteration_s(packing.work) - alone_s, 0.0), 0.0)
        return replace(plan, alone_s=alone_s)


def _has_newcomers(table: RequestTable) -> bool:
    return bool(np.any(table.is_real_time & (table.num_generated > 0) & (table.service_s == 0.0)))


def _alone_s(work: IterationWork, view: WorkerView) -> float:
    alone = work.copy()
    alone.swap_out_tokens = 0.0
    return view.costs.iteration_s(alone)


def _unit_s(work: IterationWork, view: WorkerView, rows: RowForecasts) -> float:
    table, trial = view.table, work.copy()
    ready = rows_of(DOCUMENTS, table, rows, is_ready=True, at_most=1)
    waiting = ready if len(ready) else rows_of(DOCUMENTS, table, rows, is_ready=False, at_most=1)
    if not len(waiting):
        return 0.0
    row = int(waiting[0])
    if len(ready):
        trial.add_decode(int(table.context_len[row]), is_constrained=bool(table.is_constrained[row]))
    else:
        trial.add_chunk(1, int(table.num_cached[row]), is_last=True)
        trial.swap_in_tokens += view.memory.copy_tokens(int(table.num_swapped[row]))
    return view.costs.iteration_s(trial)
