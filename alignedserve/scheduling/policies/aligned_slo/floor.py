"""The floor of `aligned_slo`: what requests that have waited too long have of a worker before all others.

Those of a class are served by priority and arrival, within a share of every iteration's time, and hold a share of the
memory that no other request takes from them: as many of the first ones as fit it, at least one. Documents are served so
to their end, and late chats until their cache is back; those furthest behind then keep it, in a share like that. Chats
whose first token is overdue begin so, and those that have begun so hold at most that share of places and memory, at
least one. The rest go first among their own class (but for late chat, which keeps its place), and are evicted for
others as they would be without having waited. So however many have waited too long, chat on time has the rest of the
time and of the memory.

Documents begin so only while their class has had less than its floor of the tokens (core/class_floor.py): what the time
that chat leaves has computed of others counts. One that has waited ten times as long as it takes to come here begins in
any case, as shorter ones may have had all of that. Without a floor of tokens it does not begin before chat; but blocks
that other documents free are kept for it, from these alone, as long as what they hold is enough.

A first one that needs more memory than the share has it all the same, once it has been first for so long that the
memory it holds is the share on average:

    wait = left * (blocks / (share * all blocks) - 1)

Until then it takes what requests on time leave. Example: the share is a tenth; a document that needs half of the
memory and 20 s waits 20 * (0.5 / 0.1 - 1) = 80 s.
"""

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from alignedserve.core.class_floor import ClassFloor
from alignedserve.core.ids import RequestId
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policies.aligned_slo.forecast import (
    BEST_EFFORT,
    LATE,
    LONGEST_WAIT,
    PRESSING,
    STARVING,
    RankGroup,
    counts_of,
    in_order,
    rows_of,
)
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.table import Bools, Ints, RequestTable, rows_where
from kernels.cpu.request_table import RowForecasts


class KeptForDocument(NamedTuple):
    """A document that has waited far too long, and may pass no chat: what other documents free is kept for it."""

    row: int
    most_blocks: int  # that they hold: it does not wait for more, or no document would ever begin beside chat


class FlooredRows(NamedTuple):
    """Forecasts of every row, of which no more are starving than the floor has room for."""

    rows: RowForecasts
    hold: Ints  # the rank by which a request keeps its memory: only one of a better rank takes it
    is_first_held: bool  # the first starving one has its memory before requests on time; True without one
    keeper: KeptForDocument | None = None  # without a floor of tokens


class Floor:
    """Gives chat its share, and documents theirs: neither waits for the other to end."""

    def __init__(
        self, share: float, return_s: float, overdue_s: float, *, starvation_s: float, best_effort_floor: float
    ) -> None:
        self._share, self._return_s, self._overdue_s = share, return_s, overdue_s
        self._longest_wait_s = LONGEST_WAIT * starvation_s
        self._tokens = ClassFloor(best_effort_floor)
        self._next_tokens = 0  # of the first document that has waited too long, and has not begun
        self._keeper: KeptForDocument | None = None
        self._of_chat, self._of_documents = _ClassShare(share), _ClassShare(share)

    def apply(self, view: WorkerView, rows: RowForecasts) -> FlooredRows:
        self._next_tokens, self._keeper = 0, None
        if not (rows.num_ready[STARVING] or rows.num_waiting[STARVING]):
            self._of_chat.forget()
            self._of_documents.forget()
            return FlooredRows(rows, self._sheltered(view, rows), is_first_held=True)
        rows = self._few_beginning(view, self._documents_owed(view, rows))
        starving = rows_where(rows.rank == STARVING)
        is_chat = view.table.is_real_time[starving]
        floored = FlooredRows(rows, self._sheltered(view, rows), is_first_held=True)
        floored = self._of_chat.apply(view, floored, starving[is_chat])
        return self._of_documents.apply(view, floored, starving[~is_chat])._replace(keeper=self._keeper)

    def note(self, table: RequestTable, plan: IterationPlan) -> None:
        if not self._next_tokens:
            return
        num_of_chat = num_of_documents = 0
        for part in plan.scheduled:
            if table.is_real_time[part.row]:
                num_of_chat += part.num_tokens
            else:
                num_of_documents += part.num_tokens
        self._tokens.note_own(num_of_documents)
        self._tokens.note_earlier(num_of_chat, self._next_tokens)

    def _documents_owed(self, view: WorkerView, rows: RowForecasts) -> RowForecasts:
        table = view.table
        starving = rows_where(rows.rank == STARVING)
        starving = starving[~table.is_real_time[starving]]
        # On prefill workers all hold their blocks before they are computed.
        is_new = (table.service_s[starving] == 0.0) & (table.num_remaining[starving] > 1)
        waiting = starving[is_new | (table.num_blocks[starving] == 0)]
        if not len(waiting) or not table.is_real_time.any():  # with no chat there is none to go before
            return rows
        first = _first_of(waiting, table)
        self._next_tokens = int(table.num_remaining[first])
        if self._tokens.is_due(self._next_tokens):
            waiting = waiting[waiting != first]
        else:
            waited_s = view.now - table.arrival_s - table.service_s
            if self._tokens.owed_share:
                waiting = waiting[waited_s[waiting] <= self._longest_wait_s]
            elif waited_s[first] > self._longest_wait_s:
                self._keeper = KeptForDocument(first, int(table.num_blocks[~table.is_real_time].sum()))
        return behind(rows, waiting) if len(waiting) else rows

    def _few_beginning(self, view: WorkerView, rows: RowForecasts) -> RowForecasts:
        """Return the forecasts with chats overdue to begin behind the floor, but for a share of places and memory.

        Those that have come so late already are counted, to the end of their answers. One may begin in any case: where
        prompts are long, a tenth of the places would be all of the memory.
        """
        table = view.table
        beginning = rows_where((rows.rank == STARVING) & table.is_real_time & (table.num_generated == 0))
        beginning = beginning[np.isfinite(table.ttft_s[beginning])]
        if not len(beginning):
            return rows
        begun = np.flatnonzero(self._has_begun_overdue(table))
        beginning = in_order(beginning, table, rows)
        needed = _blocks_for(view, np.concatenate((begun, beginning)))
        num_fitting = _num_within(self._share * view.memory.num_blocks, needed)
        num_places = int(self._share * view.limits.max_running_requests)
        num_kept = max(min(num_fitting, num_places), 1) - len(begun)
        beyond = beginning[max(num_kept, 0) :]
        return behind(rows, beyond, first=beyond[:0]) if len(beyond) else rows

    def _has_begun_overdue(self, table: RequestTable) -> Bools:
        overdue_s = table.arrival_s + table.ttft_s + self._overdue_s
        begun: Bools = table.is_real_time & (table.first_token_s > overdue_s)
        return begun

    def _sheltered(self, view: WorkerView, rows: RowForecasts) -> Ints:
        """Return the ranks, by which memory is kept, with late chats that are furthest behind sheltered by a share.

        One that had lost its cache would lose it again after a few tokens, and all that was computed for it.
        """
        late = rows_where((rows.claim == LATE) & rows.is_ready)
        if not len(late):
            return rows.rank  # as nearly always; when each token is due costs more to know
        table, due_s = view.table, view.table.next_token_due_s[late]
        is_behind = (table.num_generated[late] > 0) & (due_s + self._return_s < view.now)
        behind = late[is_behind][np.argsort(due_s[is_behind], kind="stable")]
        if not len(behind):
            return rows.rank
        num_kept = max(_num_within(self._share * view.memory.num_blocks, table.num_blocks[behind]), 1)
        hold = rows.rank.copy()
        hold[behind[:num_kept]] = STARVING
        return hold


class _ClassShare:
    def __init__(self, share: float) -> None:
        self._share = share
        self._first: RequestId | None = None
        self._due_s = np.inf  # from then on it has the memory that it needs

    def forget(self) -> None:
        self._first = None

    def apply(self, view: WorkerView, floored: FlooredRows, starving: Ints) -> FlooredRows:
        if not len(starving):
            self.forget()
            return floored
        rows, table = floored.rows, view.table
        starving = in_order(starving, table, rows)
        needed, room = _blocks_for(view, starving), self._share * view.memory.num_blocks
        num_kept = max(_num_within(room, needed), 1)
        hold, first = floored.hold, int(starving[0])
        is_held = self._is_held(table.request_ids[first], float(rows.left_s[first]), needed[0] / room, view.now)
        if num_kept < len(starving):
            others = starving[num_kept:]
            # Late chat that has lost its cache keeps its place: returned first, it would be evicted next, and so on.
            has_slo = np.isfinite(table.ttft_s[others]) | np.isfinite(table.tpot_s[others])
            rows = behind(rows, others, first=others[~(table.is_real_time[others] & has_slo)])
            hold = _with(hold, others, rows.claim)
        if not is_held:
            hold = _with(hold, starving[:1], rows.claim)
        return FlooredRows(rows, hold, floored.is_first_held and is_held)

    def _is_held(self, first: RequestId, left_s: float, shares: float, now: float) -> bool:
        if first != self._first:
            self._first, self._due_s = first, now + left_s * max(shares - 1.0, 0.0)
        return shares <= 1.0 or now >= self._due_s


def _blocks_for(view: WorkerView, rows: Ints) -> Ints:
    table = view.table
    context_len = table.prompt_len[rows] + table.num_generated[rows] + 1
    return view.memory.blocks_for_each(context_len, is_hidden=table.is_hidden[rows])


def _first_of(starving: Ints, table: RequestTable) -> int:
    priority = table.priority[starving]
    foremost = starving[priority == priority.min()]
    return int(foremost[np.argmin(table.order[foremost])])


def _num_within(room: float, blocks: Ints) -> int:
    return int(np.searchsorted(np.cumsum(blocks), room, side="right"))


def _with(hold: Ints, rows: Ints, claim: Ints) -> Ints:
    changed = hold.copy()
    changed[rows] = claim[rows]
    return changed


def behind(rows: RowForecasts, moved: Ints, *, first: Ints | None = None) -> RowForecasts:
    """Return the forecasts with these rows in the ranks of their objectives, first there: all, or only `first`."""
    rank, left_s = rows.rank.copy(), rows.left_s.copy()
    rank[moved] = rows.claim[moved]
    left_s[moved if first is None else first] = 0.0
    return rows._replace(
        rank=rank,
        left_s=left_s,
        num_ready=counts_of(rank[rows.is_ready]),
        num_waiting=counts_of(rank[~rows.is_ready]),
    )


_GAPS_LOST = 2.0  # of those that the real-time part alone would make
_WEIGHT = 1 / 16  # of the latest real-time part in their mean
DOCUMENTS = RankGroup.of(STARVING, PRESSING, BEST_EFFORT)  # once no real-time request is starving


class RealTimePacking(Protocol):
    """An iteration in construction."""

    @property
    def work(self) -> IterationWork:
        """As packed so far."""

    def add_decodes(self, group: RankGroup, budget_s: float) -> None:
        """Add next tokens within this time."""

    def add_prompts(self, group: RankGroup, budget_s: float) -> None:
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

    def pack(self, packing: RealTimePacking, view: WorkerView, rows: RowForecasts, allowed_s: float) -> IterationPlan:
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
