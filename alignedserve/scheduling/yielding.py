"""Decides whether the pass in flight stops between two layers for prompts that somebody waits for (ConServe, 2024).

The prompts are computed by an iteration of their own, while the other stands still; nothing of that is thrown away. It
costs that the work is in two passes instead of one: weights are read twice. It saves the wait for the end of the pass,
and the best-effort work that the next iteration would have beside the prompts:

    cost = pass + prompts - both in one pass
    gain = what is left of the pass + share * (both in one pass - prompts) - one layer

`share`: of best-effort tokens in the pass, as the next is likely to have as many. Example: a pass of documents, of
82 ms of which 40 are left, prompts of 35 ms, both in one pass 105 ms, twelve layers: it costs 12 ms and brings the
first token forward by 40 + 105 - 35 - 7 = 103 ms.

It is done where the gain is more than the cost and, for all who come together, more than what it delays the chats
whose first token the pass brings. And it must not hurt:
- Documents lose at most `most_cost` of their time to it: each pass earns that share of its best-effort part as credit,
  and each stop spends what it costs.
- A pass stops `most_stops` times at most, and stands still for no longer than leaves best-effort work its floor.
- Documents with a deadline still end in time.
- Chats in the pass wait for their next token, and those who come, where they decode here, for their second. They do so
  only as far as their mean gap can still be held, as later gaps are shorter than they may be; or, those who come, where
  their first token would be late without:

    late by, of chats in the pass <= tokens left behind the next * TPOT * later_share
    left of the pass + an iteration like it, of those who come <= TPOT + (predicted length - 2) * TPOT * later_share

  Example: 40 tokens with a TPOT of 0.1 s may wait for 0.1 + 38 * 0.1 * 0.05 = 0.29 s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.runtime_estimate import RefreshedEstimate, fit_request_runtime, remaining_output_len
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.scheduling.scheduler_state import Flight, SchedulerState
from alignedserve.scheduling.table import Floats, Ints, RequestTable


@dataclass(frozen=True, slots=True)
class YieldConfig:
    """Parameters; one configuration for every workload."""

    num_layers: int  # of the model
    best_effort_floor: float = 0.05  # share of the time that best-effort work has all the same
    least_gain_s: float = 0.005
    most_cost: float = 0.05  # share of the time of best-effort work
    credit_s: float = 0.5  # of it that may be spent at once
    most_stops: int = 4  # of one pass
    least_share: float = 0.25  # of best-effort tokens in it
    decodes_here: bool = True  # those who come decode on this worker, so that the rest of the pass is a gap for them
    later_share: float = 0.05  # of the gaps allowed, by which later ones are shorter: half of what aligned_slo leaves


@dataclass(slots=True)
class StoppablePass:
    """The pass in flight with forecast and stops."""

    started_s: float
    predicted_s: float
    share: float = 0.0  # of best-effort tokens
    num_stops: int = 0
    stopped_s: float = 0.0  # so far

    def left_s(self, now: float) -> float:
        return max(self.predicted_s + self.stopped_s - (now - self.started_s), 0.0)


class Yielding:
    """The rule, and the credit that it has left."""

    def __init__(self, config: YieldConfig) -> None:
        self._config = config
        self._runtime = RefreshedEstimate(fit_request_runtime)
        self._credit_s = config.credit_s

    def pass_began(self, begun: StoppablePass) -> None:
        """Earn credit for a pass that has begun."""
        earned_s = self._config.most_cost * begun.share * begun.predicted_s
        self._credit_s = min(self._credit_s + earned_s, self._config.credit_s)

    def may_stop(self, stopped: StoppablePass) -> bool:
        """Return whether the pass may stop once more, whatever comes: without a look at every request that has come."""
        return stopped.num_stops < self._config.most_stops and stopped.share >= self._config.least_share

    def plan(
        self, view: WorkerView, stopped: StoppablePass, flight: Flight, prompts: Sequence[int]
    ) -> IterationPlan | None:
        """Plan the iteration of these prompts, rows of the table, to run within the pass; None: they wait for its end.

        It takes free blocks alone. `stopped` has the stop then, and is to be told how long it was.
        """
        config, share = self._config, stopped.share
        if not self.may_stop(stopped):
            return None
        pass_s, left_s = view.costs.iteration_s(flight.work), stopped.left_s(view.now)
        num_left, _ = remaining_output_len(view.table)
        packer, together = Packer(view), flight.work.copy()
        for row in self._who_gain(view, prompts, num_left, left_s, pass_s) if config.decodes_here else prompts:
            num_tokens = min(packer.remaining(row), packer.num_tokens_left)
            if num_tokens and packer.add(row, num_tokens):
                packer.note_work(together, row, num_tokens)
        if not packer.num_scheduled:
            return None
        urgent_s, together_s = packer.predicted_s(), view.costs.iteration_s(together)
        cost_s = max(pass_s + urgent_s - together_s, 0.0)
        gain_s = left_s + share * (together_s - urgent_s) - pass_s / config.num_layers
        num_behind = _num_first_tokens(view.table, flight)
        least_s = max(config.least_gain_s, cost_s, num_behind * urgent_s / packer.num_scheduled)
        if gain_s < least_s or not self._is_within_floor(stopped, pass_s, urgent_s):
            return None
        if cost_s > self._credit_s or not self._is_in_time(view, flight.rows, num_left, left_s, urgent_s):
            return None
        self._credit_s -= cost_s
        stopped.num_stops += 1
        return packer.plan()

    def _who_gain(
        self, view: WorkerView, prompts: Sequence[int], num_left: Floats, left_s: float, pass_s: float
    ) -> list[int]:
        table, rows = view.table, np.array(prompts)
        allowed_s = table.tpot_s[rows] + self._given_back_s(table.tpot_s[rows], num_left[rows] - 2)
        else_s = view.now + left_s + self._runtime.of(view.costs).prefill_s(table.num_remaining[rows])
        is_late_else = table.next_token_due_s[rows] < else_s
        chosen: list[int] = rows[(left_s + pass_s <= allowed_s) | is_late_else].tolist()
        return chosen

    def _is_within_floor(self, stopped: StoppablePass, pass_s: float, urgent_s: float) -> bool:
        floor = self._config.best_effort_floor
        return floor * (stopped.stopped_s + urgent_s) <= (1.0 - floor) * pass_s

    def _is_in_time(self, view: WorkerView, rows: Ints, num_left: Floats, left_s: float, urgent_s: float) -> bool:
        table = view.table
        chats = rows[table.is_real_time[rows]]
        slack_s = table.next_token_due_s[chats] - (view.now + left_s)
        given_back_s = self._given_back_s(table.tpot_s[chats], num_left[chats] - 1)
        slack_s += np.where(table.num_generated[chats] > 0, given_back_s, 0.0)
        bound = rows[np.isfinite(table.deadline_s[rows]) & ~table.is_real_time[rows]]
        if len(bound):
            ends_s = view.now + self._runtime.of(view.costs).remaining_s(table, num_left)[bound]
            slack_s = np.concatenate((slack_s, table.arrival_s[bound] + table.deadline_s[bound] - ends_s))
        return not ((slack_s >= 0.0) & (slack_s < urgent_s)).any()

    def _given_back_s(self, tpot_s: Floats, num_later: Floats) -> Floats:
        bound = np.where(np.isfinite(tpot_s), tpot_s, 0.0)  # else nothing has to be given back
        return self._config.later_share * bound * np.maximum(num_later, 0.0)


def best_effort_share(table: RequestTable, flight: Flight) -> float:
    return float(flight.num_tokens @ ~table.is_real_time[flight.rows]) / max(int(flight.num_tokens.sum()), 1)


def _num_first_tokens(table: RequestTable, flight: Flight) -> int:
    rows = flight.rows
    begin = table.is_real_time[rows] & (table.num_generated[rows] == 0)
    return int(np.count_nonzero(begin & (table.num_remaining[rows] == flight.num_tokens)))


class UrgentPlans:
    """Plans urgent iterations, one at a time. For workers of any kind."""

    def __init__(self, state: SchedulerState, scheduler: Scheduler, yielding: Yielding) -> None:
        self._state = state
        self._scheduler = scheduler
        self._yielding = yielding
        self._pass = StoppablePass(0.0, 0.0)
        self._flight: Flight | None = None  # of the pass, while an urgent iteration is in flight

    def pass_began(self, now: float) -> None:
        """Note the iteration that has begun, which the state knows."""
        predicted_s = self._scheduler.costs.iteration_s(self._state.work)
        share = best_effort_share(self._state.table, self._state.set_aside())
        self._pass = StoppablePass(now, predicted_s, share)
        self._yielding.pass_began(self._pass)

    @property
    def may_begin(self) -> bool:
        return self._yielding.may_stop(self._pass)

    def begin(self, view: WorkerView, rows: Sequence[int]) -> IterationPlan | None:
        """Begin an iteration of these prompts within the one in flight; None: they wait for the end of that."""
        assert self._flight is None, "two urgent iterations at once"
        flight = self._state.set_aside()
        plan = self._yielding.plan(view, self._pass, flight, rows)
        if plan is not None:
            self._flight = flight
            self._state.begin(plan)
            self._state.history.urgent_began(min(self._state.table.ttft_s[part.row] for part in plan.scheduled))
        return plan

    def end(self, duration_s: float) -> None:
        """Note the end of the urgent iteration, which the state knows; that of the pass follows."""
        assert self._flight is not None, "an urgent iteration ended that was not begun"
        self._state.take_up(self._flight)
        self._flight = None
        self._pass.stopped_s += duration_s
