"""Choices that other papers' policies always make, as choices of `aligned_slo`: off unless set, for what each is worth.

- Levels (ALISE): of requests behind those on time, levels of remaining time that double, and within one the order of
  arrival; a long wait raises them. Wrong predictions then change the order less.
- Knapsack (Apt-Serve): where blocks are short, first tokens in the order of pending time per block.
- Hidden caches (Apt-Serve): where blocks are short for a first token that would be late, layer inputs in place of keys
  and values, if the iterations that recompute these make no token late and take less than computing the prompt again.
docs/experiments/ablations.md has the worth of each.
"""

import numpy as np
from typing_extensions import override

from alignedserve.scheduling.policies.aligned_slo.forecast import LATE, ON_TIME, URGENT, SloForecast
from alignedserve.scheduling.policies.aligned_slo.loans import Loans
from alignedserve.scheduling.policies.aligned_slo.packing import SloPacking
from alignedserve.scheduling.policy import DeviceMemory, WorkerView
from alignedserve.scheduling.runtime_estimate import remaining_output_len
from alignedserve.scheduling.table import Ints, RequestTable
from kernels.cpu.request_table import RowForecasts

# As of `alise`: docs/policies/alise.md says how they were chosen.
_NUM_LEVELS, _FIRST_LEVEL_TOKENS, _RAISED_AFTER_S = 8, 16, 60.0
_LEAST_PENDING_S = 0.001


def in_levels(rows: RowForecasts, table: RequestTable, *, decode_s: float, now: float) -> RowForecasts:
    """Return the forecast with levels in place of the time left, for requests behind those on time.

    `decode_s`: of a short context alone; sixteen of them are the first level, and each is twice as wide as the last.
    """
    first_s = _FIRST_LEVEL_TOKENS * decode_s
    by_time = np.frexp(rows.left_s / first_s)[1].astype(np.int64)
    level = np.clip(np.maximum(by_time, remaining_output_len(table)[1]), 0, _NUM_LEVELS - 1)
    waited_s = np.maximum(now - table.arrival_s - table.service_s, 0.0)
    level = np.maximum(level - (waited_s // _RAISED_AFTER_S).astype(np.int64), 0)
    return rows._replace(left_s=np.where(rows.rank >= LATE, np.ldexp(first_s, level), rows.left_s))


def by_density(rows: RowForecasts, table: RequestTable, memory: DeviceMemory, now: float) -> RowForecasts:
    """Return the forecast in which first tokens that are on time go by pending time per block, if blocks are short."""
    waits = (rows.rank >= URGENT) & (rows.rank <= ON_TIME) & (table.num_blocks == 0) & (table.num_generated == 0)
    wanted = memory.blocks_for_each(table.prompt_len + table.num_generated, is_hidden=table.is_hidden)
    if int(wanted[waits].sum()) <= memory.num_free:
        return rows
    pending_s = np.maximum(now - table.arrival_s, _LEAST_PENDING_S)
    return rows._replace(left_s=np.where(waits, wanted / pending_s, rows.left_s))


class HiddenPacking(SloPacking):
    """One decision that may begin hidden caches."""

    def __init__(self, view: WorkerView, forecast: SloForecast, loans: Loans, *, growth_tokens: int) -> None:
        super().__init__(view, forecast, loans, growth_tokens=growth_tokens)
        self._hidden: set[int] = set()  # newcomers whose keys and values do not fit
        self._saved: dict[int, int] = {}  # blocks, of those that are packed now

    @override
    def _foresee(self, rows: Ints) -> None:
        memory, num_free = self._view.memory, self._packer.num_free
        self._saved = {}
        for row in rows.tolist() if memory.hidden_ratio is not None else ():
            if self._wanted(row) > num_free and self._pays_hidden(row):
                num_tokens = self._packer.remaining(row)
                self._saved[row] = memory.blocks_for(num_tokens) - memory.blocks_for(num_tokens, is_hidden=True)
                self._hidden.add(row)

    @override
    def _wanted(self, row: int) -> int:
        return super()._wanted(row) - self._saved.get(row, 0)

    def _pays_hidden(self, row: int) -> bool:
        """Return whether its first token is urgent, and its hidden cache costs less than dropping a cache for it would.

        That is, all its iterations add less to what they take with keys and values than the prompt takes to compute
        again, and none of them makes a token late.
        """
        table = self._table
        is_newcomer = not (table.num_blocks[row] or table.num_generated[row] or table.num_cached[row])
        if self._rows.rank[row] != URGENT or not is_newcomer:
            return False
        num_tokens, costs = self._packer.remaining(row), self._view.costs
        plain, hidden = self._packer.work.copy(), self._packer.work.copy()
        plain.add_decode(num_tokens)
        hidden.add_decode(num_tokens, is_hidden=True)
        hidden_s = costs.iteration_s(hidden)
        added_s = (hidden_s - costs.iteration_s(plain)) * float(table.predicted_len[row])
        return hidden_s <= self._forecast.allowed_s and added_s <= num_tokens * self._forecast.prefill_token_s

    @override
    def _add_prompt(self, row: int, budget_s: float) -> bool:
        packer = self._packer
        num_tokens = packer.remaining(row)
        if row not in self._hidden or packer.blocks_needed(row, num_tokens) <= packer.num_free:
            return super()._add_prompt(row, budget_s)
        # It is not extended in parts, so all of the prompt is computed at once.
        within_s = max(budget_s, self._forecast.stretched_s)
        if num_tokens <= packer.num_tokens_left and self._chunk_within(row, num_tokens, within_s) == num_tokens:
            packer.add(row, num_tokens, is_hidden=True)
        return True
