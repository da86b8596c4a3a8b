"""The union of the five papers, for one iteration: objectives are constraints, throughput is what is left.

- Requests that can still hold their objectives go before those that cannot (Apt-Serve, section 4.2), and those that
  would miss them by waiting for one more iteration go first (AccelGen, section 4.3).
- The iteration lasts no longer than the least slack of its requests allows, nor so long that a prompt that arrives
  meanwhile would be late (BROS, constraint 6; AccelGen, equation 6); best-effort work fills the rest of that time.
- Requests that can wait are ordered by predicted remaining time, the shortest first, until they have waited too long;
  one without objectives takes place and memory from others with far more left to compute (ALISE).
- A request ahead of the schedule that its mean gap allows lends its memory to first tokens that would be late.
- Best-effort requests pause on the device and keep their cache (BROS); only for want of blocks it is swapped or
  dropped, whichever costs less (ALISE, section 3.2).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.packer import note_decodes
from alignedserve.scheduling.policies.slo_packing import (
    BEST_EFFORT,
    LATE,
    ON_TIME,
    STARVING,
    URGENT,
    SloForecast,
    SloPacking,
)
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.runtime_estimate import (
    RefreshedEstimate,
    fit_request_runtime,
    measure_prefill_times,
    remaining_output_len,
)
from alignedserve.scheduling.table import Bools, Floats, RequestTable


@dataclass(frozen=True, slots=True)
class AlignedSloConfig:
    """Parameters; one configuration for every workload."""

    response_share: float = 0.2  # of the tightest first-token objective: longest iteration while such prompts come
    slack_share: float = 0.9  # of the least slack: the rest is for errors of the cost model
    memory_s: float = 30.0  # for so long after its last request an objective still bounds iterations
    starvation_s: float = 60.0  # a request that waits longer, and `patience` times as long as it needs alone,
    patience: float = 10.0  # has a share of every iteration, whatever its class, and freed blocks are kept for it
    starving_share: float = 0.1  # this share, of the time that the iteration may take
    growth_tokens: int = 16  # blocks for so many more tokens of all with objectives are kept from newcomers


class AlignedSlo:
    """The policy. The page docs/policies/aligned_slo.md has the rules as formulas, and an example."""

    def __init__(self, config: AlignedSloConfig) -> None:
        self._config = config
        self._runtime = RefreshedEstimate(fit_request_runtime)
        self._prompts = RefreshedEstimate(measure_prefill_times)
        self._tightest_s = np.inf  # the tightest recent first-token objective
        self._seen_s = -np.inf  # time of the last request with it
        self._most_blocks = 0  # that requests on time held at once, recently
        self._most_s = -np.inf  # when they did

    def plan(self, view: WorkerView) -> IterationPlan:
        """See IterationPolicy."""
        cap_s = self._cap_s(view)
        forecast = self._forecast(view, cap_s)
        packing = SloPacking(view, forecast, growth_tokens=self._config.growth_tokens)
        allowed_s = forecast.allowed_s
        rank = forecast.rank
        starving, on_time, late = rank == STARVING, (rank > STARVING) & (rank < LATE), rank == LATE
        starving_s = self._config.starving_share * max(min(allowed_s, cap_s), view.history.mean_s)
        packing.add_decodes(starving, starving_s, at_least=1)
        packing.add_decodes(on_time, np.inf)
        # Decodes with objectives are not held back: the iteration is at least as long as they take.
        decodes_s = packing.predicted_s()
        budget_s = max(min(allowed_s, cap_s), decodes_s)
        is_open = packing.add_prompts(starving, decodes_s + starving_s)
        # Nor are prompts with objectives held back for later ones.
        if is_open:
            packing.add_prompts(on_time, max(allowed_s, decodes_s), least_s=decodes_s)
        for mask, until_s in ((late, max(allowed_s, decodes_s)), (~late & ~on_time, budget_s)):
            packing.add_decodes(mask, until_s)
            if is_open:
                packing.add_prompts(mask, until_s)
        return packing.plan()

    def _cap_s(self, view: WorkerView) -> float:
        """Return the longest iteration for which a prompt that arrives during it is not late; inf without such prompts.

        An objective so tight that the real-time decodes alone, or a single one, take longer cannot be held by delaying
        other work: it is ignored.
        """
        table, share = view.table, self._config.response_share
        decodes = IterationWork()
        note_decodes(decodes, table, np.flatnonzero(table.is_real_time & table.is_decoding & (table.num_swapped == 0)))
        least_s = max(view.costs.iteration_s(decodes), self._runtime.of(view.costs).decode_s)
        counts = table.is_real_time & (share * table.ttft_s >= least_s)
        tightest_s = float(np.min(table.ttft_s, where=counts, initial=np.inf))
        is_over = view.now - self._seen_s > self._config.memory_s or share * self._tightest_s < least_s
        if tightest_s <= self._tightest_s or is_over:
            self._tightest_s, self._seen_s = tightest_s, view.now
        return share * self._tightest_s

    def _forecast(self, view: WorkerView, cap_s: float) -> SloForecast:
        table, now, config = view.table, view.now, self._config
        runtime = self._runtime.of(view.costs)
        is_decoding, num_left = table.is_decoding, remaining_output_len(table)[0]
        left_s = runtime.remaining_s(table, num_left)
        prompt_s = self._prompts.of(view.costs).of(table.num_remaining)
        alone_s = np.where(is_decoding, runtime.decode_s, np.maximum(prompt_s, runtime.decode_s))
        dues = _dues_of(table)
        eviction_slack_s = table.arrival_s + table.deadline_s - left_s - now
        is_late = np.where(dues.has_begun, table.first_token_s > dues.first_s, dues.next_s - alone_s < now)
        is_late |= eviction_slack_s < 0
        is_pressing = eviction_slack_s < left_s  # a deadline: with half of the time that is left it would still be met
        is_free = np.isinf(table.ttft_s) & np.isinf(table.tpot_s)
        has_objective = (table.is_real_time & ~is_free) | is_pressing
        rank = np.where(has_objective & ~is_late, ON_TIME, np.where(table.is_real_time, LATE, BEST_EFFORT))
        is_on_time = rank == ON_TIME
        slack_s = dues.next_s - now
        horizon_s = 2 * max(view.history.mean_s, cap_s if np.isfinite(cap_s) else 0.0)
        claim = np.where(is_on_time & (np.minimum(slack_s - alone_s, eviction_slack_s) < horizon_s), URGENT, rank)
        waited_s = now - table.arrival_s - table.service_s  # in all: once it goes first it does so to its end
        has_waited = waited_s > config.starvation_s + config.patience * left_s
        is_starving = has_waited & (~is_on_time | np.isinf(slack_s))  # the others are urgent once they are due
        # Later gaps are at most `slack_share` of the allowed ones; half of those to come count, as predictions err.
        given_back_s = (1.0 - config.slack_share) / 2 * num_left * table.tpot_s
        return_s = runtime.prefill_s(table.context_len.astype(np.float64))
        return SloForecast(
            is_ready=is_decoding & (table.num_swapped == 0),
            left_s=left_s,
            rank=np.where(is_starving, STARVING, claim),
            claim=claim,
            is_free=is_free & np.isinf(table.deadline_s),
            has_waited=has_waited,
            kept_blocks=self._kept_blocks(view, is_on_time),
            allowed_s=config.slack_share * _allowed_s(slack_s, table.tpot_s, is_on_time),
            banked_s=self._stretched_s(dues, np.zeros(len(table)), now, is_on_time),
            stretched_s=self._stretched_s(dues, given_back_s, now, is_on_time),
            slack_s=slack_s,
            prefill_token_s=runtime.prefill_token_s,
            eviction_slack_s=np.minimum(dues.schedule_s - now, eviction_slack_s) - return_s - 2 * horizon_s,
        )

    def _kept_blocks(self, view: WorkerView, is_on_time: Bools) -> int:
        """Return by how many blocks requests on time recently held more than now: they may come to need these again."""
        held = int(np.sum(view.table.num_blocks, where=is_on_time))
        if held >= self._most_blocks or view.now - self._most_s > self._config.memory_s:
            self._most_blocks, self._most_s = held, view.now
        return self._most_blocks - held

    def _stretched_s(self, dues: "_Dues", given_back_s: Floats, now: float, is_on_time: Bools) -> float:
        """Return the longest iteration after which all requests that have begun can still hold their mean gap.

        `given_back_s`: what each still gains by its later gaps. A prompt that arrives as it begins still has time for a
        usual iteration.
        """
        longest_s = np.maximum(dues.next_s, dues.schedule_s) + given_back_s
        mean_s = float(np.min(longest_s, where=dues.has_begun & is_on_time, initial=np.inf)) - now
        return min(self._config.slack_share * mean_s, (1.0 - self._config.response_share) * self._tightest_s)


class _Dues(NamedTuple):
    """Due times of tokens, by row; inf without an objective."""

    has_begun: Bools
    first_s: Floats  # the first token
    schedule_s: Floats  # the next one, by the mean gap alone
    next_s: Floats  # the next one


def _dues_of(table: RequestTable) -> _Dues:
    has_begun, schedule_s = table.num_generated > 0, table.next_token_due_s
    gap_s = table.last_token_s + table.tpot_s
    # A request that has lost its cache has missed this gap; it can still hold the mean, and so has more time.
    next_s = np.where(table.num_blocks > 0, gap_s, np.maximum(gap_s, schedule_s))
    first_s = table.arrival_s + table.ttft_s
    return _Dues(has_begun, first_s, schedule_s, np.where(has_begun, next_s, first_s))


def _allowed_s(left_s: Floats, tpot_s: Floats, counts: Bools) -> float:
    """Return the longest iteration that makes no next token late; one that is late may be late by one token's time."""
    allowed = np.where(left_s > 0, left_s, tpot_s)
    return float(np.min(allowed, where=counts & ~np.isnan(allowed), initial=np.inf))
