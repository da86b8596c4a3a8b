"""A reference policy that knows every output length: as many requests as possible within all their SLOs.

AccelGen is compared with an oracle that knows output lengths and remaining times and maximises goodput (section 6.1).
This one is a heuristic with that knowledge, not a proven optimum; docs/policies/oracle.md says how far off it is.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import EvictionMode, IterationPlan, WorkerView
from alignedserve.scheduling.runtime_estimate import alone_s
from alignedserve.scheduling.table import Bools, Floats, Ints

_TINY_S = 1e-9  # sums of floats
_SIZES = np.array([1, *range(64, 1024, 64), *(1024 * 2**power for power in range(8))])


@dataclass(frozen=True, slots=True)
class OracleConfig:
    """A margin for later arrivals, which it does not know."""

    margin_s: float = 0.0  # kept between a predicted end and its due time


class Oracle:
    """The policy: earliest due first among those in time, with iterations as long as the least slack allows."""

    def __init__(self, config: OracleConfig) -> None:
        self._config = config
        self._costs: CostModel | None = None
        self._prompt_s = self._decode_s = np.zeros(len(_SIZES))

    def plan(self, view: WorkerView) -> IterationPlan:
        if not len(view.table):
            return IterationPlan()
        if self._costs is not view.costs:
            self._costs = view.costs
            self._prompt_s = np.array([alone_s(view.costs, int(size), is_prompt=True) for size in _SIZES])
            self._decode_s = np.array([alone_s(view.costs, int(size), is_prompt=False) for size in _SIZES])
        return _Iteration(view, self._forecast(view)).fill()

    def _forecast(self, view: WorkerView) -> "_OracleForecast":
        table = view.table
        tokens_left = np.maximum(table.predicted_len - table.num_generated, 1.0)
        decode_s = np.interp(table.context_len + tokens_left / 2, _SIZES, self._decode_s)
        next_s = np.where(table.is_decoding, decode_s, np.interp(table.num_remaining, _SIZES, self._prompt_s))
        is_first = table.num_generated == 0
        ttft_due_s = table.arrival_s + table.ttft_s - self._config.margin_s
        num_gaps = np.maximum(table.predicted_len - 1, 0)
        tpot_s = np.where(num_gaps > 0, table.tpot_s, np.inf)
        end_s = np.where(is_first, np.inf, table.first_token_s + np.maximum(num_gaps, 1) * tpot_s)
        end_s = np.minimum(end_s, table.arrival_s + table.deadline_s) - self._config.margin_s
        due_s = np.minimum(end_s - (tokens_left - 1) * decode_s, np.where(is_first, ttft_due_s, np.inf))
        is_late = (view.now + next_s > due_s + _TINY_S) | (decode_s > np.where(is_first, tpot_s, np.inf))
        is_late |= ~is_first & (table.first_token_s > ttft_due_s + _TINY_S)
        return _OracleForecast(tokens_left, next_s, due_s, end_s, is_late)


@dataclass(frozen=True, slots=True)
class _OracleForecast:
    tokens_left: Floats
    next_s: Floats  # to its next token
    due_s: Floats  # latest time of that token for all its SLOs to hold if it runs alone
    end_s: Floats  # latest time of its last token
    is_late: Bools  # cannot hold its SLOs any more


class _Iteration:
    def __init__(self, view: WorkerView, forecast: _OracleForecast) -> None:
        self._view = view
        self._forecast = forecast
        self._packer = Packer(view)
        self._decoding = IterationWork()  # decodes beyond this iteration
        self._until_s = np.inf  # the latest end, by requests whose next token comes with it
        table = view.table
        self._is_decode = table.is_decoding & (table.num_swapped == 0)
        self._has_memory: list[int] = np.flatnonzero(table.num_blocks > 0).tolist()

    def fill(self) -> IterationPlan:
        late = self._forecast.is_late
        self._add_decodes(np.flatnonzero(self._is_decode & ~late))
        prompts = np.flatnonzero(~self._is_decode & ~late)
        feasible, postponed = self._feasible(prompts)
        self._add_prompts(feasible, is_late=False)
        self._add_decodes(np.flatnonzero(self._is_decode & late))
        rest = np.concatenate((np.array(postponed, np.int64), np.flatnonzero(~self._is_decode & late)))
        has_none = self._view.table.num_blocks[rest] == 0
        shortest_first = rest[np.lexsort((self._view.table.order[rest], self._forecast.next_s[rest], has_none))]
        self._add_prompts(shortest_first.tolist(), is_late=True)
        if not self._packer.rows:
            self._packer.add_earliest(self._view.limits.max_tokens)
        return self._packer.plan()

    def _add_decodes(self, rows: Ints) -> None:
        order = self._view.table.order
        for row in rows[np.lexsort((order[rows], self._slack_s(rows)))].tolist():
            if self._packer.is_evicted(row):
                continue
            trial = self._packer.work.copy()
            self._packer.note_work(trial, row, 1)
            if self._packer.rows and self._ends_s(trial) > self._limit_s():
                return
            if self._packer.add(row, 1) and not self._forecast.is_late[row]:
                self._packer.note_work(self._decoding, row, 1)

    def _slack_s(self, rows: Ints) -> Floats:
        return self._forecast.end_s[rows] - self._view.now

    def _ends_s(self, work: IterationWork) -> float:
        return self._view.now + self._view.costs.iteration_s(work)

    def _limit_s(self, joining: int | None = None) -> float:
        decoding = self._decoding
        rows = [row for row in self._packer.rows if self._is_decode[row] and not self._forecast.is_late[row]]
        if joining is not None:
            decoding = decoding.copy()
            is_constrained = bool(self._view.table.is_constrained[joining])
            decoding.add_decode(int(self._view.table.context_len[joining]), is_constrained=is_constrained)
        if not rows:
            return float(self._until_s)
        step_s = self._view.costs.iteration_s(decoding)
        latest_s = self._forecast.end_s[rows] - (self._forecast.tokens_left[rows] - 1) * step_s
        return float(min(latest_s.min(), self._until_s))

    def _feasible(self, prompts: Ints) -> tuple[list[int], list[int]]:
        """Split prompts by due time: as many as can be in time one after the other, and the postponed rest.

        Moore and Hodgson: while the next one would be late, the longest of those kept so far is postponed.
        """
        due_s, order = self._forecast.due_s, self._view.table.order
        # Prompts in one iteration share its fixed cost.
        step_s = self._view.costs.iteration_s(self._decoding)
        next_s = np.maximum(self._forecast.next_s - step_s, 0.0)
        # Of those due together the shortest output first: once begun, it ends the sooner.
        keys = (order[prompts], self._forecast.tokens_left[prompts], due_s[prompts])
        ordered: list[int] = prompts[np.lexsort(keys)].tolist()
        share = self._prompt_share()
        kept: list[tuple[float, int]] = []  # the longest first
        postponed, ends_s = set(), self._view.now + step_s
        for row in ordered:
            heapq.heappush(kept, (-float(next_s[row]) / share, row))
            ends_s += float(next_s[row]) / share
            if ends_s > due_s[row]:
                longest_s, longest = heapq.heappop(kept)
                postponed.add(longest)
                ends_s += longest_s
        return [row for row in ordered if row not in postponed], [row for row in ordered if row in postponed]

    def _prompt_share(self) -> float:
        rows = [row for row in self._packer.rows if self._is_decode[row]]
        if not rows:
            return 1.0
        step_s = self._view.costs.iteration_s(self._decoding)
        paces_s = (self._forecast.end_s[rows] - self._view.now) / self._forecast.tokens_left[rows]
        return float(max(1.0 - step_s / max(float(paces_s.min()), step_s), 0.05))

    def _add_prompts(self, rows: list[int], *, is_late: bool) -> None:
        for row in rows:
            if self._packer.num_places_left < 1 or self._packer.num_tokens_left < 1:
                return
            if self._packer.is_evicted(row):
                continue
            if not self._fits_to_its_end(row, is_late):
                if is_late:
                    return
                continue
            if not self._add_prompt(row, np.inf if is_late else float(self._forecast.due_s[row])):
                return

    def _add_prompt(self, row: int, due_s: float) -> bool:
        table, packer = self._view.table, self._packer
        until_s = min(self._limit_s(row), due_s) - self._view.now
        num_tokens = packer.chunk_within(row, packer.chunk(row), until_s)
        if not num_tokens or not packer.add(row, num_tokens):
            return False
        self._has_memory.append(row)
        if due_s < np.inf and num_tokens == table.num_remaining[row]:
            self._until_s = min(self._until_s, due_s)
            is_constrained = bool(table.is_constrained[row])
            self._decoding.add_decode(int(table.context_len[row]) + 1, is_constrained=is_constrained)
        return True

    def _fits_to_its_end(self, row: int, is_late: bool) -> bool:
        table = self._view.table
        holders = [other for other in self._has_memory if not self._packer.is_evicted(other)]
        if not is_late and self._view.can_evict:
            late = [other for other in holders if self._forecast.is_late[other] and other not in self._packer]
            late.sort(key=lambda other: (-table.arrival_s[other], -table.order[other]))
            while late and not self._never_exceeds([*holders, row]):
                self._packer.evict(late[0], EvictionMode.DROP)
                holders.remove(late.pop(0))
        return not holders or holders == [row] or self._never_exceeds([*holders, row])

    def _never_exceeds(self, rows: list[int]) -> bool:
        table, memory = self._view.table, self._view.memory
        chosen = np.unique(rows)
        tokens_left = self._forecast.tokens_left[chosen]
        longest_first = np.lexsort((chosen, -tokens_left))
        tokens_left = tokens_left[longest_first]
        slots = table.context_len[chosen][longest_first] + memory.block_size - 1  # the last block is rounded up
        used = np.cumsum(slots) + np.arange(1, len(chosen) + 1) * tokens_left
        return bool(used.max() <= memory.num_blocks * memory.block_size)
