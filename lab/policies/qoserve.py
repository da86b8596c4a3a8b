"""Hybrid priorities, eager relegation and dynamic chunks (QoServe, first named Niyama: Goel et al., 2025).

- Hybrid prioritisation: prompts go by their deadline and `alpha_s` for each token that remains to be computed.
- Eager relegation: a prompt that cannot be in time any more goes behind all that can; and where there is not time for
  all, those of least importance go behind first.
- Dynamic chunking: prompts have the time until the first of the decodes beside them is due, by the cost model.
"""

import heapq
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.runtime_estimate import (
    RefreshedEstimate,
    fit_request_runtime,
    measure_prefill_times,
    remaining_output_len,
)
from alignedserve.scheduling.table import Bools, Floats, Ints, RequestTable, rows_where
from lab.policies.chunked_packing import ChunkedPacking, ChunkRule, order_of


@dataclass(frozen=True, slots=True)
class QoServeConfig:
    """Parameters; docs/policies/qoserve.md says which values are the authors'."""

    alpha_s: Annotated[float, Meta(ge=0)] = 0.008  # of priority for each remaining token; 0: earliest deadline first
    relegation: bool = True
    dynamic_chunks: bool = True  # False: as many tokens as the budget has
    token_budget: Annotated[int, Meta(ge=1)] = 2552  # the most of an iteration
    least_tokens: Annotated[int, Meta(ge=1)] = 128  # of an iteration with a prompt, however short the time
    margin: Annotated[float, Meta(ge=1)] = 1.2  # a predicted duration counts as so many times as long
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01  # share of the blocks that a new prompt has to leave free


class RowProgress(NamedTuple):
    """Where every row stands, worked out once for a decision."""

    num_remaining: Ints
    is_decoding: Bools
    next_s: Floats  # the next token is due; inf without such an objective

    @classmethod
    def of(cls, table: RequestTable) -> "RowProgress":
        num_remaining = table.num_remaining
        return cls(num_remaining, (table.num_generated > 0) & (num_remaining == 1), table.next_token_due_s)


class Needs(NamedTuple):
    """The due time of every row, and the work until then."""

    due_s: Floats  # time of the next token, without a TTFT that of the last one; inf without either
    needed_s: Floats  # until then, alone on the worker
    num_tokens: Floats  # remaining until then


class QoServe:
    """The policy: all decodes, and prompts by hybrid priority in the time that those leave.

    The page docs/policies/qoserve.md has the formulas and an example.
    """

    def __init__(self, config: QoServeConfig) -> None:
        self._config = config
        self._runtime = RefreshedEstimate(fit_request_runtime)
        self._prompts = RefreshedEstimate(measure_prefill_times)

    def plan(self, view: WorkerView) -> IterationPlan:
        table, config = view.table, self._config
        standing = RowProgress.of(table)
        is_decoding, needs = standing.is_decoding, self._needs(view, standing)
        has_due = np.isfinite(needs.due_s)
        key = np.where(has_due, needs.due_s, table.arrival_s) + config.alpha_s * needs.num_tokens
        is_behind = ~has_due
        if config.relegation:
            is_behind |= self._relegated(view, is_decoding, needs, key)
        is_behind &= ~is_decoding
        level = np.where(table.is_real_time, is_behind, 2)
        # Decodes come first: their rest of the time is for prompts.
        group = np.where(is_decoding, level, np.where(is_behind, 3 + level, 3))
        order = order_of(view, key, group=group, level=level)
        rule = self._within_slack(view, standing) if config.dynamic_chunks else Packer.remaining
        budget, watermark = config.token_budget, config.watermark
        return ChunkedPacking(view, order, token_budget=budget, chunk_rule=rule, watermark=watermark).plan()

    def _needs(self, view: WorkerView, standing: RowProgress) -> Needs:
        table, runtime, prompts = view.table, self._runtime.of(view.costs), self._prompts.of(view.costs)
        num_remaining, is_decoding, next_s = standing
        to_prefill = np.where(is_decoding, 0, num_remaining)
        prefill_s = np.where(is_decoding, 0.0, prompts.of(num_remaining))
        deadline_s = table.arrival_s + table.deadline_s
        is_interactive = np.isfinite(next_s) | ~np.isfinite(deadline_s)
        if is_interactive.all():
            return Needs(next_s, prefill_s, to_prefill.astype(np.float64))
        num_left, _ = remaining_output_len(table)
        return Needs(
            np.where(is_interactive, next_s, deadline_s),
            np.where(is_interactive, prefill_s, runtime.remaining_s(table, num_left)),
            to_prefill + np.where(is_interactive, 0.0, num_left),
        )

    def _relegated(self, view: WorkerView, is_decoding: Bools, needs: Needs, key: Floats) -> Bools:
        table = view.table
        is_prompt = ~is_decoding & np.isfinite(needs.due_s)
        relegated: Bools = is_prompt & (view.now + needs.needed_s > needs.due_s)
        in_time = rows_where(is_prompt & ~relegated)
        if len(in_time) < 2:
            return relegated
        importance = np.where(table.is_real_time, 0, _BEST_EFFORT) + table.priority
        if np.ptp(importance[in_time]):
            in_time = in_time[np.lexsort((table.order[in_time], key[in_time]))]
            relegated[yielding(in_time, view.now, needs, importance)] = True
        return relegated

    def _within_slack(self, view: WorkerView, standing: RowProgress) -> ChunkRule:
        table = view.table
        is_ready = standing.is_decoding & (table.num_blocks > 0) & (table.num_swapped == 0)
        due_s = float(standing.next_s[is_ready].min(initial=np.inf))
        slack_s = (due_s - view.now) / self._config.margin

        def rule(packer: Packer, row: int) -> int:
            at_most = min(packer.remaining(row), packer.num_tokens_left)
            least = min(self._config.least_tokens - packer.work.num_tokens, at_most)
            return max(packer.chunk_within(row, at_most, slack_s), least)

        return rule


_BEST_EFFORT = 1 << 32  # less important than any priority of a real-time request


def yielding(rows: Ints, now: float, needs: Needs, importance: Ints) -> list[int]:
    """Choose the prompts to demote so that the rest meet their deadlines, computed one after the other.

    For a late prompt the least important prompt so far yields (the largest number; of equals the longest), if it is
    less important than the late one.
    """
    late_s, yielded = now, []
    before: list[tuple[int, float, int]] = []
    for row in rows.tolist():
        heapq.heappush(before, (-int(importance[row]), -float(needs.needed_s[row]), row))
        late_s += float(needs.needed_s[row])
        while late_s > needs.due_s[row] and -before[0][0] > importance[row]:
            _, minus_s, other = heapq.heappop(before)
            late_s += minus_s
            yielded.append(other)
    return yielded
