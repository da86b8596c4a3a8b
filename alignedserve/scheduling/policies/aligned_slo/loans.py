"""Loans of memory: chats ahead of their own schedule give theirs to first tokens that would be late, and return for it.

Two bounds keep loans from going round and round where memory is short for long, as in an overload:

- While computing lent caches again would take more than `starving_share` of `loan_s`, no prompt begins.
- While as much is lent as the device has blocks for, nobody lends: it could not all come back at once.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from alignedserve.scheduling.policies.aligned_slo.forecast import ON_TIME, STARVING, URGENT, SloForecast
from alignedserve.scheduling.policy import WorkerView
from alignedserve.scheduling.table import rows_where


class _Lent(NamedTuple):
    """Tokens of chats on time which have begun, and whose memory others have."""

    num_tokens: int  # whose keys and values come back
    num_computed_again: int  # of these, those that neither the host nor the pool has


class Loans:
    """The loans of one decision."""

    def __init__(self, view: WorkerView, forecast: SloForecast) -> None:
        self._view = view
        self._table = view.table
        self._forecast = forecast
        self._rows = forecast.rows

    @cached_property
    def lenders(self) -> list[int]:
        """Requests ahead of their schedule, the furthest last; none while as much is lent as the device holds."""
        memory, eviction_slack_s = self._view.memory, self._rows.eviction_slack_s
        if self._lent.num_tokens >= memory.slots_in(memory.num_blocks):
            return []
        can_lend = self._rows.is_ready & (self._rows.rank > STARVING) & (eviction_slack_s > 0)
        rows = np.flatnonzero(can_lend & (self._table.num_blocks > 0) & self._view.can_evict)
        furthest_last: list[int] = rows[np.lexsort((self._table.order[rows], eviction_slack_s[rows]))].tolist()
        return furthest_last

    @cached_property
    def left_s(self) -> float:
        """Seconds of computing again for which chats on time may still lend; below zero where more is lent or lost.

        Below zero, too, while one has been silent for too long.
        """
        forecast = self._forecast
        if forecast.is_silent:
            return -np.inf
        return forecast.loans_s - self._lent.num_computed_again * forecast.prefill_token_s

    @cached_property
    def _lent(self) -> _Lent:
        rows, table = self._rows, self._table
        if not any(rows.num_waiting[URGENT : ON_TIME + 1]):
            return _Lent(0, 0)
        lent = rows_where((rows.claim <= ON_TIME) & ~rows.is_ready & (table.num_generated > 0))
        return _Lent(int(table.context_len[lent].sum()), int(table.num_remaining[lent].sum()))
