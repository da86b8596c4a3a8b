"""Loans of memory: chats ahead of their own schedule give theirs to first tokens that would be late, and return for it.

A loan helps over a burst. Where memory is short for longer, caches would go round and round, and all would be late. So

- who lends keeps its cache, on the host or in the pool: none is computed again for a loan (packing.py);
- loans may take `loan_share` of the time for copies within iterations, or `loan_credit_s` at once;
- loans stop when the lent caches together would fill the device, as they could not all come back at once.
"""

from functools import cached_property

import numpy as np

from alignedserve.scheduling.policies.aligned_slo.forecast import ON_TIME, STARVING, URGENT, SloForecast
from alignedserve.scheduling.policy import WorkerView
from alignedserve.scheduling.table import rows_where


class LoanCredit:
    """Keeps account of the time that the loans of a worker may take."""

    def __init__(self, share: float, most_s: float) -> None:
        """`share`: of the time, which is earned as it passes. `most_s`: as much is kept at most, and there at first."""
        self._share, self._most_s = share, most_s
        self._left_s = most_s
        self._earned_until_s = 0.0

    def earn(self, now: float) -> None:
        self._left_s = min(self._left_s + self._share * (now - self._earned_until_s), self._most_s)
        self._earned_until_s = now

    def spend(self, cost_s: float) -> bool:
        """Take this much of the credit; return False, and take nothing, if there is less."""
        if cost_s > self._left_s:
            return False
        self._left_s -= cost_s
        return True


class Loans:
    """Finds who may lend in one decision."""

    def __init__(self, view: WorkerView, forecast: SloForecast, credit: LoanCredit) -> None:
        self._view = view
        self._table = view.table
        self._rows = forecast.rows
        self.credit = credit

    @cached_property
    def lenders(self) -> list[int]:
        """List the requests ahead of their schedule whose cache has room elsewhere, the furthest last.

        It is empty while all that is lent would fill the device.
        """
        table, memory, eviction_slack_s = self._table, self._view.memory, self._rows.eviction_slack_s
        if self._num_lent_tokens() >= memory.slots_in(memory.num_blocks):
            return []
        can_lend = self._rows.is_ready & (self._rows.rank > STARVING) & (eviction_slack_s > 0)
        can_lend &= (table.num_blocks > 0) & self._view.can_evict
        if self._view.pool is None:
            can_lend &= table.num_cached <= memory.num_free_host
        rows = np.flatnonzero(can_lend)
        furthest_last: list[int] = rows[np.lexsort((table.order[rows], eviction_slack_s[rows]))].tolist()
        return furthest_last

    def _num_lent_tokens(self) -> int:
        rows = self._rows
        if not any(rows.num_waiting[URGENT : ON_TIME + 1]):
            return 0
        lent = rows_where((rows.claim <= ON_TIME) & ~rows.is_ready & (self._table.num_generated > 0))
        return int(self._table.context_len[lent].sum())
