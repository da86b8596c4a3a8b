"""One iteration of the default policy: objectives are constraints, throughput is what is left. Ideas of four papers:

- Requests that can still hold their objectives go before those that cannot (Apt-Serve, section 4.2), and those that
  would miss them by waiting for one more iteration go first (AccelGen, section 4.3). Where not all can, the fewest
  prompts give way (forecast.py).
- The iteration lasts no longer than the least slack of its requests allows, nor so long that a prompt that arrives
  meanwhile would be late (BROS, constraint 6; AccelGen, equation 6); best-effort work fills the rest of that time.
- Requests that can wait are ordered by predicted remaining time, the shortest first, until they have waited too long;
  one without objectives takes place and memory from others with far more left to compute (ALISE).
- A request ahead of the schedule that its mean gap allows lends its memory to first tokens that would be late.
- Best-effort requests pause on the device and keep their cache (BROS); only for want of blocks it is swapped or
  dropped, whichever costs less (ALISE, section 3.2).
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from alignedserve.config.sections.scheduling import MAX_INTERFERENCE
from alignedserve.core.class_floor import OVERDUE_S
from alignedserve.scheduling.policies.aligned_slo.floor import Floor, Interference, has_gaps, without_starving_chat
from alignedserve.scheduling.policies.aligned_slo.forecast import (
    BEST_EFFORT,
    LATE,
    ON_TIME,
    PRESSING,
    STARVING,
    URGENT,
    RankGroup,
    Situation,
    SloForecast,
    forecast_rows,
    is_any_silent,
    num_contending,
    num_of,
    real_time_work,
    relegated,
)
from alignedserve.scheduling.policies.aligned_slo.packing import Lenders, LoanCredit, SloPacking
from alignedserve.scheduling.policies.aligned_slo.pool import PooledPacking
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.runtime_estimate import (
    PrefillTimes,
    RefreshedEstimate,
    fit_request_runtime,
    measure_prefill_times,
    remaining_output_len,
)
from alignedserve.scheduling.table import RequestTable, rows_where
from kernels.cpu.request_table import RowForecasts

_NUM_PROMPTS = 64
_COVERED = 0.9  # of them


class PromptReserve:
    """The time by which documents leave chats ahead of their mean gap: what the next long prompt takes.

        usual   = what nine of ten of the latest prompts of chat take alone
        reserve = 0 if stretch * usual <= longest, else min(usual, longest)
        until   = max(ahead - reserve, alone + share * (budget - alone))

    `longest`: the longest prompt that could be in time. `stretch`: times as long as alone that a prompt takes in parts.
    `ahead`: until the first next token is due by mean gaps. `alone`: the iteration without documents. Example: chats
    have a mean gap of 50 ms, prompts take 400 ms, iterations alone 20 ms. A chat is ahead by 400 ms after 13 tokens:
    until then documents prolong iterations by 2 to 3 ms, later by 25.
    """

    def __init__(self, share: float) -> None:
        """`share`: of the time left that documents have while a chat is not ahead enough; 1: nothing is kept."""
        self._share = share
        self._latest_s: deque[float] = deque(maxlen=_NUM_PROMPTS)
        self._num_seen = 0  # requests that have come to the worker
        self._usual_s = 0.0

    def note(self, table: RequestTable, prompts: PrefillTimes) -> None:
        """Note prompts that have come: real-time ones with an objective for their first token."""
        if table.num_added == self._num_seen:
            return
        has_come = table.is_real_time & (table.order >= self._num_seen)
        rows = np.flatnonzero(has_come & (table.num_generated == 0) & np.isfinite(table.ttft_s))
        self._num_seen = table.num_added
        if len(rows):
            self._latest_s.extend(prompts.of(table.num_remaining[rows]).tolist())
            self._usual_s = sorted(self._latest_s)[math.ceil(_COVERED * len(self._latest_s)) - 1]

    def until_s(self, ahead_s: float, *, alone_s: float, budget_s: float, longest_s: float, stretch: float) -> float:
        if not self._usual_s or self._usual_s * stretch <= longest_s:
            return budget_s
        kept_s = min(self._usual_s, longest_s)
        least_s = alone_s + self._share * max(budget_s - alone_s, 0.0)
        return min(max(ahead_s - kept_s, least_s), budget_s)


_STARVING, _ON_TIME, _LATE = RankGroup.of(STARVING), RankGroup.of(URGENT, ON_TIME), RankGroup.of(LATE)
_REAL_TIME, _PRESSING = RankGroup.of(URGENT, ON_TIME, LATE), RankGroup.of(PRESSING)
_OTHERS = RankGroup.of(STARVING, BEST_EFFORT)


@dataclass(frozen=True, slots=True)
class AlignedSloConfig:
    """Parameters; one configuration for every workload."""

    response_share: float = 0.2  # of the tightest first-token objective: longest iteration while such prompts come
    bounded_share: float = 0.08  # likewise where gaps are bounded: chats that come meanwhile are in each other's gaps
    least_room: float = 1.5  # that is no less than so many times what chat's decodes take,
    tight_share: float = 0.5  # up to this share of the objective: else they leave documents nothing
    stopped_share: float = 0.35  # of it while none waits, where the pass stops for those that come
    idle_share: float = 0.5  # of the last one, where no such prompt has come for `memory_s`
    documents_share: float = 0.1  # of the time that is left, while a chat is not ahead by what a prompt takes
    slack_share: float = 0.9  # of the least slack: the rest is for errors of the cost model
    usual_stretch: float = 1.05  # errors that the rest is for: where iterations take longer, as beside others on the
    # same cores, the share is less
    memory_s: float = 30.0  # for so long after its last request an objective still bounds iterations
    starvation_s: float = 60.0  # a request that waits longer, and `patience` times as long as it needs alone,
    patience: float = 10.0  # has a share of every iteration, and freed blocks are kept for it
    loan_s: float = 60.0  # so long after its last token a chat on time that has lent its memory is due at the latest
    loan_share: float = 0.05  # of the time, that copies for loans may take within iterations;
    loan_credit_s: float = 2.0  # as much of it at once
    silence_s: float = math.inf  # while a chat that has begun lacks its cache for longer than this, nothing begins
    return_s: float = 10.0  # so long after its last token a late chat that has lost its cache has that share
    overdue_s: float = OVERDUE_S  # so long after its first token was due a chat that has none has it
    pause_s: float = 1.0  # so long a late chat that has begun pauses with its cache
    most_stretch: float = 2.5  # times as long as alone that a prompt keeps others waiting, by decodes beside it
    starving_share: float = 0.1  # the share, of the time that the iteration may take and of the memory
    growth_tokens: int = 16  # newcomers leave blocks for this many more tokens of each request with objectives
    interference: float | None = None  # `scheduling.interference`: best effort prolongs gaps of chat by this factor
    best_effort_floor: float = 0.05  # share of the time, or of the tokens, that it has all the same; the router's

    def __post_init__(self) -> None:
        if self.interference is not None and not 1.0 <= self.interference <= MAX_INTERFERENCE:
            raise ValueError(f"interference must be at least 1 and at most {MAX_INTERFERENCE:g}")
        if self.silence_s <= 0.0:
            raise ValueError("silence_s must be above 0")
        if not 0.0 <= self.best_effort_floor <= 0.5:
            raise ValueError("best_effort_floor must be at least 0 and at most 0.5")
        if not 0.0 <= self.documents_share <= 1.0:
            raise ValueError("documents_share must be at least 0 and at most 1")
        if self.loan_share < 0.0 or self.loan_credit_s < 0.0:
            raise ValueError("loan_share and loan_credit_s must be at least 0")


class AlignedSlo:
    """The policy. The page docs/policies/aligned_slo.md has the rules as formulas, and an example."""

    def __init__(self, config: AlignedSloConfig) -> None:
        self._config = config
        self._credit = LoanCredit(config.loan_share, config.loan_credit_s)
        self._floor = Floor(
            config.starving_share,
            config.return_s,
            config.overdue_s,
            starvation_s=config.starvation_s,
            best_effort_floor=config.best_effort_floor,
        )
        bound = config.interference
        self._interference = None if bound is None else Interference(bound, config.best_effort_floor)
        self._reserve = PromptReserve(config.documents_share)
        self._runtime = RefreshedEstimate(fit_request_runtime)
        self._prompts = RefreshedEstimate(measure_prefill_times)
        self._tightest_s = np.inf  # the tightest recent first-token objective
        self._seen_s = -np.inf  # time of the last request with it
        self._last_s = np.inf  # the last one there was
        self._most_blocks = 0  # that requests on time held at once, recently
        self._most_s = -np.inf  # when they did

    def plan(self, view: WorkerView) -> IterationPlan:
        plan = self._plan(view)
        self._floor.note(view.table, plan)
        return plan

    def _plan(self, view: WorkerView) -> IterationPlan:
        self._credit.earn(view.now)
        cap_s, stopped_s = self._longest_s(view)
        interference = self._interference
        if interference is not None and not has_gaps(view.table):
            cap_s = min(cap_s, interference.without_gaps_s(view.now, self._config.memory_s))
            interference = None
        forecast = self._forecast(view, cap_s, interference)
        loans = Lenders(view, forecast, self._credit)
        packing_type = SloPacking if view.pool is None else PooledPacking
        packing = packing_type(view, forecast, loans, growth_tokens=self._config.growth_tokens)
        allowed_s = forecast.allowed_s
        if interference is not None:
            packing.add_decodes(_ON_TIME, np.inf)
            decodes, decodes_s = packing.work.copy(), packing.predicted_s()
            packing.add_prompts(_ON_TIME, max(allowed_s, decodes_s), decodes=decodes)
            packing.add_decodes(_LATE, max(allowed_s, decodes_s))
            packing.add_prompts(_LATE, max(allowed_s, decodes_s))
            return interference.pack(packing, view, forecast.rows, max(min(allowed_s, cap_s), decodes_s))
        starving_s = self._config.starving_share * max(min(allowed_s, cap_s), view.history.mean_s)
        starving_classes = (True, False) if num_of(_STARVING, forecast.rows) else ()
        for are_chats in starving_classes:
            packing.add_decodes(_STARVING, starving_s, at_least=1, are_chats=are_chats)
        packing.add_decodes(_ON_TIME, np.inf)
        # Decodes with objectives are not held back: the iteration is at least as long as they take.
        decodes, decodes_s = packing.work.copy(), packing.predicted_s()
        budget_s = max(min(allowed_s, cap_s), decodes_s)
        for are_chats in starving_classes:
            packing.add_prompts(_STARVING, packing.predicted_s() + starving_s, are_chats=are_chats)
        # Nor are prompts with objectives held back for later ones.
        packing.add_prompts(_ON_TIME, max(allowed_s, decodes_s), decodes=decodes)
        if self._is_worth_stopping(view, forecast.rows):
            budget_s = max(min(allowed_s, stopped_s), decodes_s)
        for group, until_s in ((_LATE, max(allowed_s, decodes_s)), (_PRESSING, budget_s)):
            packing.add_decodes(group, until_s)
            packing.add_prompts(group, until_s)
        if num_of(_PRESSING, forecast.rows):
            budget_s = min(budget_s, self._paced_s(view, forecast.rows, packing.predicted_s()))
        if starving_classes:
            packing.add_decodes(_STARVING, budget_s, are_chats=True)
            packing.add_prompts(_STARVING, budget_s, are_chats=True)
        if num_of(_OTHERS, forecast.rows):
            budget_s = self._unreserved_s(view, forecast.rows, packing.predicted_s(), budget_s)
        packing.add_decodes(_OTHERS, budget_s, are_chats=False)
        packing.add_prompts(_OTHERS, budget_s, are_chats=False)
        return packing.plan()

    def _unreserved_s(self, view: WorkerView, rows: RowForecasts, alone_s: float, budget_s: float) -> float:
        """Return how long the iteration may be with documents, so that chats stay ahead by what a prompt takes.

        Where no prompts are computed, none prolongs their gaps.
        """
        if not view.computes_prompts or math.isinf(rows.banked_until_s):
            return budget_s
        longest_s = (1.0 - self._config.response_share) * self._tightest_s
        ahead_s = rows.banked_until_s - view.now
        num_waiting = sum([rows.num_waiting[rank] for rank in _REAL_TIME.ranks])
        stretch = math.inf if num_waiting > 1 else self._stretch(view, budget_s)  # in parts they delay each other
        return self._reserve.until_s(ahead_s, alone_s=alone_s, budget_s=budget_s, longest_s=longest_s, stretch=stretch)

    def _paced_s(self, view: WorkerView, rows: RowForecasts, least_s: float) -> float:
        """Return how long iterations may be for documents whose deadline presses, so that each is in time.

        Those that would be late with iterations of `least_s` bound nothing.
        """
        table, pressing = view.table, rows_where(rows.rank == PRESSING)
        until_s = table.arrival_s[pressing] + table.deadline_s[pressing] - view.now
        each_s = self._config.slack_share * until_s / remaining_output_len(table)[0][pressing]
        return float(np.min(each_s, where=each_s >= least_s, initial=np.inf))

    def _is_worth_stopping(self, view: WorkerView, rows: RowForecasts) -> bool:
        """Return whether prompts that come during a longer iteration need not wait for its end, and no prompt of chat
        waits for it now: its weights are read once for more documents then."""
        is_awaited = any(rows.num_waiting[rank] for rank in _REAL_TIME.ranks)
        return view.passes_stop and self._interference is None and not is_awaited

    def _longest_s(self, view: WorkerView) -> tuple[float, float]:
        """Return how long an iteration may be for the sake of prompts that come meanwhile, and one that is worth
        stopping; inf: nothing is known of such prompts."""
        if not view.computes_prompts:
            return math.inf, math.inf
        config = self._config
        decodes, tightest_s = real_time_work(view.table)
        decodes_s = max(view.costs.iteration_s(decodes), self._runtime.of(view.costs).decode_s)
        tightest_s = self._tightest_ttft_s(view, min(tightest_s, view.history.urgent_ttft_s), decodes_s)
        if math.isinf(tightest_s):
            idle_s = config.idle_share * self._last_s  # else the first chats of a burst would find the longest of all
            return idle_s, idle_s
        # Iterations hardly longer than the decodes alone would leave documents nothing.
        least_s = min(config.least_room * decodes_s, config.tight_share * tightest_s)
        share = config.response_share if self._interference is None else config.bounded_share
        return max(share * tightest_s, least_s), max(config.stopped_share * tightest_s, least_s)

    def _tightest_ttft_s(self, view: WorkerView, tightest_s: float, decodes_s: float) -> float:
        """Return the first-token objective of prompts that may come, which bounds iterations; inf without objectives.

        `tightest_s`: of the requests that there are. `decodes_s`: what the real-time decodes alone, or a single one,
        take. An objective of which that is more than `tight_share` is not held by delaying other work: it is ignored.
        """
        table, share = view.table, self._config.tight_share
        if share * tightest_s < decodes_s:
            counts = table.is_real_time & (share * table.ttft_s >= decodes_s)
            tightest_s = float(np.min(table.ttft_s, where=counts, initial=np.inf))
        cannot_be_held = share * self._tightest_s < decodes_s
        is_over = view.now - self._seen_s > self._config.memory_s or cannot_be_held
        if tightest_s <= self._tightest_s or is_over:
            self._tightest_s, self._seen_s = tightest_s, view.now
        if math.isfinite(self._tightest_s) or cannot_be_held:
            self._last_s = self._tightest_s
        return self._tightest_s

    def _forecast(self, view: WorkerView, cap_s: float, interference: Interference | None) -> SloForecast:
        now, config = view.now, self._config
        runtime, prompts = self._runtime.of(view.costs), self._prompts.of(view.costs)
        self._reserve.note(view.table, prompts)
        situation = Situation(
            now=now,
            horizon_s=2 * max(view.history.mean_s, cap_s if math.isfinite(cap_s) else 0.0),
            prefill_token_s=runtime.prefill_token_s,
            decode_context_s=runtime.decode_context_s,
            decode_s=runtime.decode_s,
            starvation_s=config.starvation_s,
            patience=config.patience,
            # Later gaps are at most `slack_share` of the allowed ones, of which half counts, as predictions err; unless
            # prompts that would be late prolong them again and again, which what they were of late tells.
            given_back=(1.0 - config.slack_share) / 2,
            usual_gap_s=view.history.usual_s,
            pause_s=config.pause_s,
            return_s=config.return_s,
            loan_s=config.loan_s,
            overdue_s=config.overdue_s,
            pace_s=view.history.mean_s,
        )
        rows = forecast_rows(view.table, situation, prompts)
        if num_contending(rows) > 1:
            rows = relegated(view.table, rows, self._stretch(view, min(rows.allowed_s, cap_s)))
        slack_share = self._slack_share(view)
        allowed_s = copies_s = slack_share * rows.allowed_s
        if interference is not None:
            rows = without_starving_chat(view.table, rows)
            copies_s = min(copies_s, interference.copies_s(view, real_time_work(view.table).decodes))
        rows, hold, is_floor_held, keeper = self._floor.apply(view, rows)
        return SloForecast(
            rows=rows,
            hold=hold,
            is_floor_held=is_floor_held,
            allowed_s=allowed_s,
            copies_s=copies_s,
            is_bound=interference is not None,
            banked_s=self._stretched_s(rows.banked_until_s - now, slack_share),
            stretched_s=self._stretched_s(rows.stretched_until_s - now, slack_share),
            kept_blocks=self._kept_blocks(rows.held_blocks, now),
            prefill_token_s=runtime.prefill_token_s,
            is_silent=math.isfinite(config.silence_s) and is_any_silent(view.table, rows, now - config.silence_s),
            keeper=keeper,
        )

    def _stretch(self, view: WorkerView, longest_s: float) -> float:
        decodes_s = view.costs.iteration_s(real_time_work(view.table).decodes)
        beside = decodes_s / longest_s if math.isfinite(longest_s) else 0.0
        return min(1.0 / max(1.0 - beside, 1e-9), self._config.most_stretch)

    def _kept_blocks(self, held: int, now: float) -> int:
        if held >= self._most_blocks or now - self._most_s > self._config.memory_s:
            self._most_blocks, self._most_s = held, now
        return self._most_blocks - held

    def _slack_share(self, view: WorkerView) -> float:
        config = self._config
        return config.slack_share * min(config.usual_stretch / view.history.stretch, 1.0)

    def _stretched_s(self, ahead_s: float, slack_share: float) -> float:
        """Return the longest iteration after which all requests that have begun can still hold their mean gap.

        `ahead_s`: by how much they are ahead of it. A prompt that arrives as the iteration begins still has time
        for a usual one.
        """
        return min(slack_share * ahead_s, (1.0 - self._config.response_share) * self._tightest_s)
