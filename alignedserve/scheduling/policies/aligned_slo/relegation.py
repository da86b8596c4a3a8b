"""Who gives way in an overload: the fewest prompts, so that all others have their first token in time.

Where the waiting prompts, computed one after the other by the time they are due, cannot all be in time, the least
important of those up to the first late one gives way, of equals the one that takes longest (Moore, 1968: no other
choice leaves fewer late). It counts as late until the next decision, which chooses anew. Prompts that others wait for
take longer than alone, as decodes are computed beside them. A prompt itself may be computed in one go, unless prompts
that are late already wait: in an overload, where nobody is ahead of the schedule, it would be late all the same.

Example, with 1 s for each thousand tokens and nothing beside: a prompt of 3 000 tokens is due in 3 s, one of 1 000 in
3.5 s and another in 4 s. All together take 5 s. The first gives way, and two are in time; with it, one would be.
"""

import heapq

import numpy as np

from alignedserve.scheduling.policies.aligned_slo.forecast import LATE, ON_TIME, URGENT, counts_of
from alignedserve.scheduling.table import Floats, Ints, RequestTable, rows_where
from kernels.cpu.request_table import RowForecasts

MOST_PROMPTS = 256  # that are looked at, the first ones due: later ones have time


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
    """Return which of these prompts give way, by their places.

    `alone_s`: to compute each. `stretch`: how many times as long it keeps those after it waiting. `own_stretch`: how
    many times as long it takes until its own token.
    """
    by_due = np.argsort(slack_s, kind="stable")
    before_s = stretch * (np.cumsum(alone_s[by_due]) - alone_s[by_due])
    if np.all(before_s + own_stretch * alone_s[by_due] <= slack_s[by_due]):
        return []
    waited_s, yielding = 0.0, []
    kept: list[tuple[int, float, int]] = []  # the one to give way first on top
    for place in by_due.tolist():
        most_s = float(slack_s[place] - own_stretch * alone_s[place])  # to wait for others
        if most_s < 0:
            yielding.append(place)
            continue
        heapq.heappush(kept, (-int(priority[place]), -float(alone_s[place]), place))
        while waited_s > most_s:
            other = heapq.heappop(kept)[2]
            yielding.append(other)
            if other == place:
                break
            waited_s -= stretch * float(alone_s[other])
        else:
            waited_s += stretch * float(alone_s[place])
    return yielding
