"""Forecasts of `aligned_slo`: by when each request needs its next token, and how long it takes to its end.

The kernel computes the same as the plain form here, to the last bit: a decision needs a hundred small operations.
"""

import heapq
from typing import NamedTuple

import numpy as np

from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.runtime_estimate import (
    PROMPT_LENGTHS,
    PrefillTimes,
    RequestRuntimeModel,
    remaining_output_len,
)
from alignedserve.scheduling.table import Bools, Floats, Ints, RequestTable, rows_where
from alignedserve.scheduling.table_operations import note_decodes
from kernels.cpu import request_table as native
from kernels.cpu.request_table import RowForecasts

# Ranks, the best first: the order of scheduling, and the reverse order of eviction.
STARVING, URGENT, ON_TIME, LATE, PRESSING, BEST_EFFORT = range(6)
_NUM_RANKS = 6
# A deadline presses when it is no further off than so many times what is left to do,
_PRESSING_TIMES = 4.0  # on a worker of its own;
_PACED_TIMES = 2.0  # at the pace of late
# A request has waited too long after so many times `starvation_s` in any case: how much it has left may be a bad guess,
# such as all of the context, where none of its class had ended when it came.
LONGEST_WAIT = 10.0
_NO_ROWS = np.empty(0, np.int64)


class RankGroup(NamedTuple):
    """Ranks that are packed together."""

    ranks: tuple[int, ...]
    bits: int  # one for each of them

    @classmethod
    def of(cls, *ranks: int) -> "RankGroup":
        return cls(ranks, sum(1 << rank for rank in ranks))


class Situation(NamedTuple):
    """The values beside the table that forecasts depend on, in seconds, in the order in which the kernel takes them."""

    now: float
    horizon_s: float  # a request with no more time than this is urgent
    prefill_token_s: float  # as in RequestRuntimeModel, like the next two
    decode_context_s: float
    decode_s: float
    starvation_s: float  # as in AlignedSloConfig
    patience: float
    given_back: float  # of a mean gap, by which each later gap is expected to be shorter, at most
    usual_gap_s: float  # what gaps were of late; the closer to the mean gap, the less is given back
    pause_s: float  # as in AlignedSloConfig
    return_s: float
    loan_s: float
    overdue_s: float
    pace_s: float  # iterations of late: from one token of a request to its next


class SloForecast(NamedTuple):
    """Forecasts of every row, and of all of them."""

    rows: RowForecasts
    hold: Ints  # the rank by which a row keeps its memory (floor.py)
    is_floor_held: bool  # no request takes memory from the first starving one
    allowed_s: float  # the longest iteration that makes no next token late
    copies_s: float  # the longest that copies of evicted caches may take
    is_bound: bool  # no cache that comes back takes an iteration beyond its time
    banked_s: float  # the longest in which all still hold their mean gap, by what they are ahead of their schedule
    stretched_s: float  # the longest after which all requests that have begun still hold their mean gap
    kept_blocks: int  # more than requests on time hold now, they held lately: not for newcomers that they would evict
    prefill_token_s: float  # to compute one token of a prompt, as against copying it
    is_silent: bool = False  # a chat that has begun lacks its cache, and has been silent for longer than it may be
    keeper: tuple[int, int] | None = None  # a row for which blocks are kept as well, if it lacks no more than so many

    def keeps_blocks(self, row: int, num_missing: int) -> bool:
        """Return whether blocks are kept for a row that lacks so many: a starving one, or as in floor.py."""
        is_keeper = self.keeper is not None and row == self.keeper[0] and num_missing <= self.keeper[1]
        return is_keeper or bool(self.rows.rank[row] == STARVING)


class RealTimeWork(NamedTuple):
    """The real-time requests of a table."""

    decodes: IterationWork  # one token of each that decodes with its whole cache on the device
    least_ttft_s: float  # of all; inf without any


def real_time_work(table: RequestTable) -> RealTimeWork:
    work = IterationWork()
    if table.has_kernels:
        decodes = native.real_time_decodes(table.columns, len(table))
        work.add_decodes(decodes.num, decodes.context_len, decodes.longest, decodes.hidden_len, decodes.num_constrained)
        return RealTimeWork(work, decodes.least_ttft_s)
    is_ready = table.is_real_time & table.is_decoding & (table.num_swapped == 0)
    note_decodes(work, table, np.flatnonzero(is_ready))
    return RealTimeWork(work, float(np.min(table.ttft_s, where=table.is_real_time, initial=np.inf)))


def forecast_rows(table: RequestTable, situation: Situation, prompts: PrefillTimes) -> RowForecasts:
    if table.has_kernels:
        return native.slo_forecast(table.columns, len(table), situation, PROMPT_LENGTHS, prompts.probed_s)
    return _plain_forecast(table, situation, prompts)


def is_any_silent(table: RequestTable, forecast: RowForecasts, since_s: float) -> bool:
    """Return whether a chat with objectives that has begun lacks its cache, and got no token since then."""
    if not any(forecast.num_waiting[: LATE + 1]):
        return False
    has_slo = np.isfinite(table.ttft_s) | np.isfinite(table.tpot_s)
    lacks = table.is_real_time & has_slo & (table.num_generated > 0) & ~forecast.is_ready
    return bool(np.any(lacks & (table.last_token_s < since_s)))


def num_of(group: RankGroup, forecast: RowForecasts) -> int:
    return sum([forecast.num_ready[rank] + forecast.num_waiting[rank] for rank in group.ranks])


def rows_of(
    group: RankGroup, table: RequestTable, forecast: RowForecasts, *, is_ready: bool, at_most: int | None = None
) -> Ints:
    """Return the first `at_most` rows of this group, ready or waiting ones, sorted by `in_order`."""
    counts = forecast.num_ready if is_ready else forecast.num_waiting
    count = 0
    for rank in group.ranks:
        count += counts[rank]
    if at_most is not None and at_most < count:
        count = at_most
    if not count:
        return _NO_ROWS
    if table.has_kernels:
        columns = (forecast.rank, forecast.left_s, forecast.is_ready)
        return native.ordered_rows(table.columns, len(table), columns, is_ready=is_ready, ranks=group.bits, count=count)
    rows = np.flatnonzero((group.bits >> forecast.rank) & (forecast.is_ready == is_ready))
    if count < len(rows):
        ranks = forecast.rank[rows]
        rows = rows[ranks <= np.partition(ranks, count - 1)[count - 1]]
    return in_order(rows, table, forecast)[:count]


def in_order(rows: Ints, table: RequestTable, forecast: RowForecasts) -> Ints:
    """Sort rows by rank, priority, time left and arrival at the worker.

    Starving requests go by arrival: shorter requests do not delay longer ones.
    """
    rank = forecast.rank[rows]
    left_s = np.where(rank == STARVING, 0.0, forecast.left_s[rows])
    ordered: Ints = rows[np.lexsort((table.order[rows], left_s, table.priority[rows], rank))]
    return ordered


def _plain_forecast(table: RequestTable, situation: Situation, prompts: PrefillTimes) -> RowForecasts:
    runtime, now, horizon_s = RequestRuntimeModel(*situation[2:5]), situation.now, situation.horizon_s
    is_decoding, num_left = table.is_decoding, remaining_output_len(table)[0]
    left_s = runtime.remaining_s(table, num_left)
    alone_s = np.where(is_decoding, runtime.decode_s, np.maximum(prompts.of(table.num_remaining), runtime.decode_s))
    dues = _dues_of(table, situation.loan_s)
    until_s = table.arrival_s + table.deadline_s - now
    deadline_slack_s = until_s - left_s
    is_late = np.where(dues.has_begun, table.first_token_s > dues.first_s, dues.next_s - alone_s < now)
    is_late |= deadline_slack_s < 0
    pressing_s = np.maximum(_PRESSING_TIMES * left_s, _PACED_TIMES * (num_left * situation.pace_s))
    is_pressing = (until_s < pressing_s) & ~is_late
    has_no_slo = np.isinf(table.ttft_s) & np.isinf(table.tpot_s)
    is_on_time = table.is_real_time & (is_pressing | (~has_no_slo & ~is_late))
    slack_s = dues.next_s - now
    is_urgent = is_on_time & (np.minimum(slack_s - alone_s, deadline_slack_s) < horizon_s)
    of_chat = np.where(is_urgent, URGENT, np.where(is_on_time, ON_TIME, LATE))
    claim = np.where(table.is_real_time, of_chat, np.where(is_pressing, PRESSING, BEST_EFFORT))
    waited_s = now - table.arrival_s - table.service_s  # in all: a request that starves goes first to its end
    longest_s = LONGEST_WAIT * situation.starvation_s
    has_waited = waited_s > np.minimum(situation.starvation_s + situation.patience * left_s, longest_s)
    # Others than these are urgent once they are due.
    is_ready, is_free = is_decoding & (table.num_swapped == 0), has_no_slo & np.isinf(table.deadline_s)
    is_late_chat, paused_s = table.is_real_time & ~has_no_slo & is_late, now - table.last_token_s
    must_return = dues.has_begun & ~is_ready & (paused_s > situation.return_s)
    must_begin = ~dues.has_begun & (dues.first_s + situation.overdue_s < now)
    must_go_on = is_late_chat & dues.has_begun & is_ready & (paused_s > situation.pause_s)
    is_starving = np.where(is_late_chat, must_return | must_begin, has_waited & (~is_on_time | np.isinf(slack_s)))
    rank = np.where(is_starving, STARVING, np.where(must_go_on, ON_TIME, claim))
    is_overtakable = is_free & ~has_waited & (rank >= LATE) & (table.num_blocks > 0)
    # With its cache away a request needs the time to compute it again.
    back_s = runtime.prefill_s(table.context_len.astype(np.float64))
    lasts_s = np.maximum(dues.next_s, dues.schedule_s)
    has_gaps = dues.has_begun & is_on_time
    later_gaps_s = np.maximum((1.0 - situation.given_back) * table.tpot_s - situation.usual_gap_s, 0.0)
    given_back_s = num_left * np.minimum(situation.given_back * table.tpot_s, later_gaps_s)
    # Until the first token that is all that others wait for: the tokens after it are computed beside theirs.
    left_s = np.where(is_on_time & ~dues.has_begun & ~np.isinf(dues.first_s), alone_s, left_s)
    return RowForecasts(
        left_s=np.where(rank == PRESSING, until_s, left_s),
        slack_s=slack_s,
        eviction_slack_s=np.minimum(dues.lent_s - now, deadline_slack_s) - back_s - 2 * horizon_s,
        rank=rank,
        claim=claim,
        is_ready=is_ready,
        is_free=is_free,
        has_waited=has_waited,
        is_overtakable=is_overtakable,
        held_blocks=int(np.sum(table.num_blocks, where=is_on_time)),
        allowed_s=_allowed_s(slack_s, table.tpot_s, is_on_time),
        banked_until_s=_least(lasts_s, has_gaps),
        stretched_until_s=_least(lasts_s + given_back_s, has_gaps),
        num_overtakable=int(np.count_nonzero(is_overtakable)),
        num_ready=counts_of(rank[is_ready]),
        num_waiting=counts_of(rank[~is_ready]),
    )


class _Dues(NamedTuple):
    has_begun: Bools
    first_s: Floats  # the first token
    schedule_s: Floats  # the next one, by the mean gap alone
    lent_s: Floats  # the next one of a request whose memory others have
    next_s: Floats  # the next one


def _dues_of(table: RequestTable, loan_s: float) -> _Dues:
    has_begun, schedule_s = table.num_generated > 0, table.next_token_due_s
    gap_s, first_s = table.last_token_s + table.tpot_s, table.arrival_s + table.ttft_s
    # A request that has lost its cache has missed this gap; it can still hold the mean, and so has more time, though
    # not for minutes: someone reads its answer.
    lent_s = np.where(has_begun, np.minimum(schedule_s, np.maximum(gap_s, table.last_token_s + loan_s)), schedule_s)
    next_s = np.where(table.num_blocks > 0, gap_s, np.maximum(gap_s, lent_s))
    return _Dues(has_begun, first_s, schedule_s, lent_s, np.where(has_begun, next_s, first_s))


def _allowed_s(left_s: Floats, tpot_s: Floats, counts: Bools) -> float:
    allowed = np.where(left_s > 0, left_s, tpot_s)
    return _least(allowed, counts & ~np.isnan(allowed))


def _least(values: Floats, counts: Bools) -> float:
    return float(np.min(values, where=counts, initial=np.inf))


def counts_of(rank: Ints) -> tuple[int, ...]:
    return tuple(np.bincount(rank, minlength=_NUM_RANKS).tolist())


MOST_PROMPTS = 256  # looked at, by due time: later prompts have time


def num_contending(rows: RowForecasts) -> int:
    return sum(rows.num_waiting[URGENT : ON_TIME + 1])


def relegated(table: RequestTable, rows: RowForecasts, stretch: float) -> RowForecasts:
    own_stretch = stretch if rows.num_waiting[LATE] else 1.0
    is_waiting = (rows.rank >= URGENT) & (rows.rank <= ON_TIME) & ~rows.is_ready
    waiting = rows_where(is_waiting & (table.num_generated == 0) & np.isfinite(rows.slack_s))
    if len(waiting) > MOST_PROMPTS:
        waiting = waiting[np.argpartition(rows.slack_s[waiting], MOST_PROMPTS)[:MOST_PROMPTS]]
    alone_s, slack_s = rows.left_s[waiting], rows.slack_s[waiting]
    yielding = giving_way(slack_s, alone_s, table.priority[waiting], stretch=stretch, own_stretch=own_stretch)
    if not yielding:
        return rows
    rank, claim = rows.rank.copy(), rows.claim.copy()
    rank[waiting[yielding]] = claim[waiting[yielding]] = LATE
    return rows._replace(rank=rank, claim=claim, num_waiting=counts_of(rank[~rows.is_ready]))


def giving_way(
    slack_s: Floats, alone_s: Floats, priority: Ints, *, stretch: float = 1.0, own_stretch: float = 1.0
) -> list[int]:
    """Choose the fewest prompts to be late so that all others have their first token in time (Moore, 1968).

    Prompts compute one after the other by due time. Up to the first late prompt, the least important gives way; of
    equals the longest. `stretch`: decodes beside a prompt make later prompts wait so many times `alone_s`;
    `own_stretch`: and the prompt itself. Example: prompts of 3, 1 and 1 s are due in 3, 3.5 and 4 s: the first gives
    way.
    """
    by_due = np.argsort(slack_s, kind="stable")
    before_s = stretch * (np.cumsum(alone_s[by_due]) - alone_s[by_due])
    if np.all(before_s + own_stretch * alone_s[by_due] <= slack_s[by_due]):
        return []
    waited_s, yielding = 0.0, []
    staying: list[tuple[int, float, int]] = []  # the one to give way first on top
    for prompt in by_due.tolist():
        most_s = float(slack_s[prompt] - own_stretch * alone_s[prompt])  # to wait for others
        if most_s < 0:
            yielding.append(prompt)
            continue
        heapq.heappush(staying, (-int(priority[prompt]), -float(alone_s[prompt]), prompt))
        while waited_s > most_s:
            other = heapq.heappop(staying)[2]
            yielding.append(other)
            if other == prompt:
                break
            waited_s -= stretch * float(alone_s[other])
        else:
            waited_s += stretch * float(alone_s[prompt])
    return yielding
