"""`aligned_slo`, the default: one number a request, one budget an iteration, and a table of guarantees.

The *latest start* of a request is the time at which its next piece (the rest of its prompt, or one token) must begin
for its objective to hold. `rank` sorts requests by it, `budget` bounds the iteration by the least slack of chats that
decode, and `fill` (scheduling/filling.py) takes pieces in that order while the predicted time stays within, and evicts
from the end of the order. Guarantees have their share before. docs/policies/aligned_slo.md has an example.
"""

import heapq
import math
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from alignedserve.config.sections.scheduling import MAX_INTERFERENCE
from alignedserve.core.class_floor import ClassFloor
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.filling import DOCUMENT, LATE, ON_TIME, PRESSING, Filling, Rows
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.runtime_estimate import (
    RefreshedEstimate,
    fit_request_runtime,
    measure_prefill_times,
    remaining_output_len,
)
from alignedserve.scheduling.table import Bools, Floats, Ints, rows_where

_PRESSING_TIMES = 4.0  # a deadline presses when it is no further off than so many times the work that is left
_PACED_TIMES = 2.0  # or than so many times what it takes at the pace of late
_SHORT_FIRST = 2.0  # so many times its own time is added to when a prompt is due
_MOST_PROMPTS = 256  # that are looked at, by due time
_MOST_STRETCH = 2.5  # times as long as alone that a prompt takes in parts
_PROMPTS_AHEAD = 2.0  # usual ones, by which documents leave chats ahead of their mean gap, at most
_CLOSE_SHARE = 0.75  # of its objective, from which on a wait for a first token was a close one
_MANY_CLOSE = 0.1  # share of chats that waited closely, from which on documents leave all of that
_USUAL_STRETCH = 1.05  # errors of the cost model that slack_share is for
_GAPS_LOST = 2.0  # of a chat that comes between two of its tokens, where interference is bounded
_FORGOTTEN_TIMES = 20.0  # memory_s, after which a worker without chats expects none
_WEIGHT = 1 / 16  # of the latest in a moving average
_GUARANTEES = ("documents", "overdue", "return")


Share = Annotated[float, Meta(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class AlignedSloConfig:
    """Parameters; one configuration for every workload."""

    slack_share: Share = 0.9  # of the slack of chats: the rest is for errors of the cost model
    response_share: Share = 0.2  # of the tightest first-token objective: the longest iteration with documents
    memory_s: Annotated[float, Meta(ge=0)] = 30.0  # a tight TTFT counts beside looser ones, after its last request
    longest_gap_s: Annotated[float, Meta(ge=0)] = 1.0  # of a chat that has begun, by a prompt beside it
    growth_tokens: Annotated[int, Meta(ge=0)] = 16  # newcomers leave blocks for so many more tokens of each chat
    best_effort_floor: float = 0.05  # share of the tokens that each guarantee has in any case
    return_s: Annotated[float, Meta(ge=0)] = 10.0  # so long a chat may lack its cache before it has a guarantee
    interference: float | None = None  # documents prolong an iteration of chats to so many times its length at most

    def __post_init__(self) -> None:
        if self.interference is not None and not 1.0 <= self.interference <= MAX_INTERFERENCE:
            raise ValueError(f"interference must be at least 1 and at most {MAX_INTERFERENCE:g}")
        if not 0.0 <= self.best_effort_floor <= 0.5:
            raise ValueError("best_effort_floor must be at least 0 and at most 0.5")


class Budget(NamedTuple):
    """The longest that an iteration may be, in seconds."""

    urgent_s: float  # with a first token that can be in time: chats may be slower than their mean gap for it
    usual_s: float  # with others of chat
    documents_s: float


class AlignedSlo:
    """The policy."""

    def __init__(self, config: AlignedSloConfig) -> None:
        self._config = config
        self._runtime = RefreshedEstimate(fit_request_runtime)
        self._prompts = RefreshedEstimate(measure_prefill_times)
        self._tightest_s, self._tightest_at_s = math.inf, -math.inf
        self._prompt_s, self._num_seen = 0.0, 0  # of a usual prompt of chat
        self._wait_s, self._waits_until_s = 0.0, -math.inf  # for a first token, of late
        self._close_share = _MANY_CLOSE  # of such waits, as a share: nothing is known yet
        self._alone_s, self._gaps_until_s = 0.0, -math.inf  # the last iteration of chats, as if alone
        self._floors = {name: ClassFloor(config.best_effort_floor) for name in _GUARANTEES}

    def plan(self, view: WorkerView) -> IterationPlan:
        rows = self.rank(view)
        self._note(view, rows)
        config, runtime, has_begun = self._config, self._runtime.of(view.costs), view.table.num_generated > 0
        guaranteed = self._guaranteed(view, rows)
        filling = Filling(
            view,
            rows,
            guaranteed.values(),
            growth_tokens=config.growth_tokens,
            token_s=runtime.prefill_token_s,
        )
        filling.add_decodes(rows.is_ready & (rows.group <= LATE))
        chats_s = filling.predicted_s()
        budget = self.budget(view, rows, chats_s)
        is_awaited = bool((~rows.is_ready & (rows.group <= LATE)).any())
        own_s = {
            name: filling.add_guaranteed(row, self._floors[name].owed, budget.usual_s)
            for name, row in guaranteed.items()
        }
        if "documents" in guaranteed:
            until_s = chats_s + self._floors["documents"].owed
            own_s["documents"] += filling.add_decodes(rows.is_ready & (rows.group > LATE), until_s)
        floors_s = filling.predicted_s() - chats_s
        filling.add_prompts(self._urgent(rows, budget, chats_s), budget.urgent_s)
        filling.add_prompts(rows.group == ON_TIME, budget.usual_s)
        # A first token in time comes with the end of the iteration: late prompts prolong that by little.
        begins = bool(((rows.group == ON_TIME) & ~rows.is_ready).any())
        filling.add_prompts(rows.group == LATE, budget.usual_s / 2 if begins else budget.usual_s)
        alone_s, documents_s = filling.predicted_s() - floors_s, budget.documents_s
        has_gaps = config.interference is not None and bool((has_begun & (rows.group <= LATE)).any())
        if config.interference is not None:
            documents_s = min(documents_s, self._bound_s(view, config.interference, alone_s, has_gaps=has_gaps))
        for group in (PRESSING, DOCUMENT):
            filling.add_decodes(rows.is_ready & (rows.group == group), documents_s)
            filling.add_prompts(rows.group == group, documents_s)
        plan = replace(filling.plan(), alone_s=alone_s) if has_gaps else filling.plan()
        iteration_s = filling.predicted_s()
        if "documents" in own_s:
            own_s["documents"] += iteration_s - floors_s - alone_s
        for name, row in guaranteed.items():
            self._floors[name].note_own(own_s[name])
            # Prompts of chat share the time that decodes leave, which may be a small part of an iteration.
            others_s = iteration_s - own_s[name] - (chats_s if is_awaited else 0.0)
            self._floors[name].note_earlier(others_s, float(rows.piece_s[row]) + iteration_s)
        return plan

    # --- rank

    def rank(self, view: WorkerView) -> Rows:
        """Return the group of every request, its latest start, and its place in the order of its group."""
        table, now, history_s = view.table, view.now, view.history.mean_s
        runtime = self._runtime.of(view.costs)
        is_decoding, has_begun, is_chat = table.is_decoding, table.num_generated > 0, table.is_real_time
        piece_s = np.where(is_decoding, runtime.decode_s, runtime.prefill_s(table.num_remaining.astype(np.float64)))
        prompts = rows_where(is_chat & ~is_decoding)
        if len(prompts):
            alone_s = self._prompts.of(view.costs).of(table.num_remaining[prompts])
            piece_s[prompts] = np.maximum(alone_s, runtime.decode_s)
        is_ready = is_decoding & (table.num_swapped == 0)
        for row in rows_where(table.num_swapped > 0).tolist():
            piece_s[row] += view.costs.swap_s(view.memory.copy_tokens(int(table.num_swapped[row])))
        due_s = table.next_token_due_s - now
        # A chat whose first token was in time can still hold its mean gap.
        is_late = np.where(has_begun, table.first_token_s > table.arrival_s + table.ttft_s, due_s < piece_s)
        is_late |= np.isinf(table.ttft_s) & np.isinf(table.tpot_s) & np.isinf(table.deadline_s)
        group = np.where(is_chat, np.where(is_late, LATE, ON_TIME), DOCUMENT)
        start_s = np.where(is_chat, due_s - piece_s, np.inf)
        # A chat on time bounds the iteration, also while its cache is on its way here.
        is_bound = (group == ON_TIME) & has_begun & (is_ready | (due_s > 0.0))
        slack_s = np.where(is_bound, due_s, np.inf)
        bound = rows_where(np.isfinite(table.deadline_s))
        if len(bound):
            num_left = remaining_output_len(table)[0]
            left_s = runtime.remaining_s(table, num_left)[bound]
            until_s, num_left = (table.arrival_s + table.deadline_s)[bound] - now, num_left[bound]
            start_s[bound] = np.minimum(start_s[bound], until_s - left_s)
            is_pressing = until_s < np.maximum(_PRESSING_TIMES * left_s, _PACED_TIMES * num_left * history_s)
            of_chat = np.where(until_s < left_s, LATE, group[bound])
            of_documents = np.where(is_pressing & (until_s >= left_s), PRESSING, DOCUMENT)
            group[bound] = np.where(is_chat[bound], of_chat, of_documents)
            is_paced = (group[bound] == PRESSING) & is_ready[bound]
            slack_s[bound] = np.where(is_chat[bound], slack_s[bound], np.where(is_paced, until_s / num_left, np.inf))
        # Documents that hold memory go first, then all as they came; of chats on time short prompts pass long ones.
        came = (table.num_cached == 0) * 2.0**40 + table.order
        key = np.where(group == LATE, piece_s, np.where(group == DOCUMENT, came, start_s + piece_s))
        key += np.where(group == ON_TIME, _SHORT_FIRST * piece_s, 0.0)
        return self._relegated(view, Rows(group, key, start_s, piece_s, is_ready, slack_s))

    def _relegated(self, view: WorkerView, rows: Rows) -> Rows:
        table = view.table
        is_prompt = (rows.group == ON_TIME) & ~rows.is_ready & (table.num_generated == 0)
        waiting = rows_where(is_prompt & np.isfinite(rows.start_s))
        if len(waiting) < 2:
            return rows
        if len(waiting) > _MOST_PROMPTS:
            waiting = waiting[np.argpartition(rows.start_s[waiting], _MOST_PROMPTS)[:_MOST_PROMPTS]]
        takes_s, stretch = rows.piece_s[waiting], self._stretch(view, rows)
        yielding = giving_way(rows.start_s[waiting] + takes_s, takes_s, table.priority[waiting], stretch=stretch)
        if not yielding:
            return rows
        group, key, late = rows.group.copy(), rows.key.copy(), waiting[yielding]
        group[late], key[late] = LATE, rows.piece_s[late]
        return rows._replace(group=group, key=key)

    def _stretch(self, view: WorkerView, rows: Rows) -> float:
        ready, work = rows_where(rows.is_ready & (rows.group <= LATE)), IterationWork()
        if not len(ready):
            return 1.0
        context_len = view.table.context_len[ready]
        work.add_decodes(len(ready), int(context_len.sum()), int(context_len.max()))
        budget_s = min(float(rows.slack_s.min()), self._config.longest_gap_s)
        return min(1.0 / max(1.0 - view.costs.iteration_s(work) / max(budget_s, 1e-9), 1e-9), _MOST_STRETCH)

    # --- budget

    def budget(self, view: WorkerView, rows: Rows, chats_s: float) -> Budget:
        """Return how long the iteration may be; `chats_s`: the decodes of chats, never less.

        A prompt may use what chats are ahead of their mean gap, documents may use what is beyond a usual prompt of it.
        """
        config, table = self._config, view.table
        urgent_s = usual_s = documents_s = math.inf
        bound = rows_where(np.isfinite(rows.slack_s) & (rows.group == ON_TIME))
        if len(bound):
            slack_s, tpot_s = rows.slack_s[bound], table.tpot_s[bound]
            usual_s = float(tpot_s.min())
            urgent_s = min(float(np.maximum(slack_s, tpot_s).min()), max(config.longest_gap_s, usual_s))
            num_kept = _PROMPTS_AHEAD * min(self._close_share / _MANY_CLOSE, 1.0) if view.computes_prompts else 0.0
            ahead_s = np.maximum(slack_s - num_kept * self._prompt_s, 0.0)
            documents_s = float(np.minimum(ahead_s, tpot_s).min())
        is_prompt = (rows.group == ON_TIME) & (table.num_generated == 0)
        first_s = float(np.min(rows.start_s + rows.piece_s, where=is_prompt, initial=np.inf))
        pressing_s = float(np.min(rows.slack_s, where=rows.group == PRESSING, initial=np.inf))
        # Where iterations take longer than predicted, as beside others on the same cores, they are planned shorter.
        share = config.slack_share * min(_USUAL_STRETCH / view.history.stretch, 1.0)
        urgent_s, usual_s = min(share * urgent_s, first_s), share * min(usual_s, first_s)
        documents_s = share * min(documents_s, first_s, pressing_s)
        if view.computes_prompts:
            documents_s = min(documents_s, config.response_share * self._tightest_s)
        return Budget(*(max(longest_s, chats_s) for longest_s in (urgent_s, usual_s, documents_s)))

    def _bound_s(self, view: WorkerView, interference: float, alone_s: float, *, has_gaps: bool) -> float:
        if has_gaps:
            self._alone_s, self._gaps_until_s = max(alone_s, self._runtime.of(view.costs).decode_s), view.now
            return interference * self._alone_s
        # A chat that comes between two tokens waits for the iteration in flight.
        comes_soon = not view.computes_prompts and view.now - self._gaps_until_s < self._config.memory_s
        return _GAPS_LOST * self._alone_s if comes_soon else math.inf

    def _urgent(self, rows: Rows, budget: Budget, chats_s: float) -> Bools:
        """Return which prompts of chat would be late in iterations no longer than mean gaps."""
        is_prompt: Bools = (rows.group == ON_TIME) & ~rows.is_ready
        usual_s = budget.usual_s
        if not 0.0 < usual_s < math.inf:
            return is_prompt
        needed_s = float(rows.piece_s.sum(where=is_prompt)) / max(1.0 - chats_s / usual_s, 1e-9)
        is_urgent: Bools = is_prompt & (rows.start_s + rows.piece_s < needed_s + usual_s)
        return is_urgent

    # --- guarantees

    def _guaranteed(self, view: WorkerView, rows: Rows) -> dict[str, int]:
        """Return the first request of every guarantee that holds."""
        table, config, now = view.table, self._config, view.now
        has_begun, is_chat = table.num_generated > 0, rows.group <= LATE
        is_overdue = (rows.group == LATE) & ~has_begun & np.isfinite(table.ttft_s)
        members = {
            "documents": ~is_chat,
            "overdue": is_overdue & (now - table.arrival_s > 2.0 * np.maximum(table.ttft_s, self._wait_s)),
            "return": is_chat & has_begun & ~rows.is_ready & (now - table.last_token_s > config.return_s),
        }
        return {name: self._first(view, mask) for name, mask in members.items() if mask.any()}

    def _first(self, view: WorkerView, mask: Bools) -> int:
        table, rows = view.table, rows_where(mask)
        rows = rows[table.priority[rows] == table.priority[rows].min()]
        return int(rows[np.argmin(table.order[rows])])

    # --- what was seen

    def _note(self, view: WorkerView, rows: Rows) -> None:
        table, now = view.table, view.now
        if table.num_added != self._num_seen:
            newcomers = table.is_real_time & (table.order >= self._num_seen) & (table.num_generated == 0)
            for piece_s in rows.piece_s[newcomers].tolist():
                self._prompt_s += _WEIGHT * (piece_s - self._prompt_s)
            self._num_seen = table.num_added
        began = table.is_real_time & (table.first_token_s > self._waits_until_s)
        waits_s = (table.first_token_s - table.arrival_s)[began]
        for wait_s, is_close in zip(waits_s.tolist(), waits_s > _CLOSE_SHARE * table.ttft_s[began], strict=True):
            self._wait_s += _WEIGHT * (wait_s - self._wait_s)
            self._close_share += _WEIGHT * (is_close - self._close_share)
        self._waits_until_s = now
        tightest_s = float(np.min(table.ttft_s, where=table.is_real_time, initial=np.inf))
        tightest_s = min(tightest_s, view.history.urgent_ttft_s)
        memory_s = self._config.memory_s * (1.0 if math.isfinite(tightest_s) else _FORGOTTEN_TIMES)
        is_over = now - self._tightest_at_s > memory_s
        if tightest_s <= self._tightest_s or is_over:
            self._tightest_s, self._tightest_at_s = tightest_s, now


def giving_way(slack_s: Floats, alone_s: Floats, priority: Ints, *, stretch: float = 1.0) -> list[int]:
    """Choose the fewest prompts to be late so that all others have their first token in time (Moore, 1968).

    Prompts compute one after the other by due time. Up to the first late prompt, the least important gives way; of
    equals the longest. `stretch`: decodes beside a prompt make later prompts wait so many times `alone_s`. Example:
    prompts of 3, 1 and 1 s are due in 3, 3.5 and 4 s: the first gives way.
    """
    by_due = np.argsort(slack_s, kind="stable")
    before_s = stretch * (np.cumsum(alone_s[by_due]) - alone_s[by_due])
    if np.all(before_s + alone_s[by_due] <= slack_s[by_due]):
        return []
    waited_s, yielding = 0.0, []
    staying: list[tuple[int, float, int]] = []  # the one to give way first on top
    for prompt in by_due.tolist():
        most_s = float(slack_s[prompt] - alone_s[prompt])  # to wait for others
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
