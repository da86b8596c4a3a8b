"""The floors of `aligned_slo`: the share of a worker for starving requests, and the share of best effort beside chat.

Starving requests have waited too long. Each class serves its starving requests by priority and arrival, within a share
of every iteration's time and memory: as many as fit, at least one. Documents keep the share to their end, late chats
until their cache is back; the chats furthest behind then keep their cache. Overdue chats begin within a share of places
and memory, at least one. All further starving requests go first in their class (late chat keeps its turn) and can be
evicted. So chat on time has the rest of the time and of the memory.

A starving document begins only while documents have had less than their floor of tokens (core/class_floor.py), or after
ten times the wait that makes it starve. Without a floor of tokens it never begins before chat: it then gets the blocks
that other documents free.

A first request may need more memory than the share. It gets the memory after a wait that makes the share right on
average:

    wait = left * (blocks / (share * all blocks) - 1)

Example: a document needs half of the memory for 20 s, the share is a tenth: it waits 20 * (0.5 / 0.1 - 1) = 80 s.
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
        """Move overdue chats behind the floor that exceed a share of places and memory; one may always begin.

        Chats that began overdue count until their answers end.
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
        """Return the ranks by which memory is kept: a share shelters the chats furthest behind, lest a cache that was
        recomputed is lost again after a few tokens."""
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
        self._due_s = np.inf  # then the first request gets its memory

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
            # Late chat without a cache keeps its turn: a cache that returns first would be evicted next.
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
    """Return the forecasts with starving chats in the rank of their objectives: the bound counts them as real-time."""
    starving = np.flatnonzero((rows.rank == STARVING) & table.is_real_time)
    return behind(rows, starving) if len(starving) else rows


class Interference:
    """The bound on gaps of chat that best effort prolongs, and what best effort is owed below the bound.

    While a chat waits for its next token, an iteration lasts at most `bound` times its real-time part (`alone`). Copies
    of best-effort caches count. Best effort keeps its floor: at most one `unit` (a token, or the copy of a cache) stays
    owed.

        owed  <- min(owed, unit) + floor / (1 - floor) * alone
        until  = max(min(what objectives allow, bound * alone), alone + owed)
        owed  <- max(owed - (the iteration - alone), 0)

    Separate decode workers get chats in the middle of a gap: while such chats come, iterations of documents alone last
    at most twice the mean of `alone`. Example: bound 1.1, floor 5 %, four chats take 20 ms alone, a document 1 ms: two
    documents fit into 22 ms. With 1.02 none fits into 20.4 ms; the floor owes 1.05 ms, so one does.
    """

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
