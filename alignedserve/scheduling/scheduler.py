"""A policy with the costs and limits of its worker, and what these allow."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from alignedserve.core.ids import RequestId
from alignedserve.costmodel.model import CostModel, LearningCostModel, ShownSpeed
from alignedserve.costmodel.straggler import delay_beside
from alignedserve.costmodel.work import IterationWork
from alignedserve.messages.workers import DecodeDelay
from alignedserve.scheduling.drafting import DraftLimits
from alignedserve.scheduling.picture_turns import ExpectedTurns
from alignedserve.scheduling.policy import IterationLimits, IterationPlan, IterationPolicy, WorkerView
from alignedserve.scheduling.scheduler_state import SchedulerState
from alignedserve.scheduling.table_operations import note_decodes

_LEAST_TOKEN_S = 1e-8  # a learned cost model may find that a prompt prolongs an iteration by nothing


class PromptCapacity(NamedTuple):
    """Time and speed that a worker has for prompts beside its decodes."""

    share: float  # of its time
    tokens_per_s: float  # in all of its time


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A policy with the costs and limits of its worker."""

    policy: IterationPolicy
    costs: CostModel
    limits: IterationLimits
    learner: LearningCostModel | None = None  # `costs` again, where it is one that learns
    computes_prompts: bool = True  # False: of a separate decode worker
    turns: ExpectedTurns = field(default_factory=ExpectedTurns)  # of an encoder of pictures, between iterations
    shown: ShownSpeed = field(default_factory=ShownSpeed)  # by what was learned from

    @property
    def present_costs(self) -> CostModel:
        """Return the present costs of iterations, with turns of the encoder."""
        return self.turns.beside(self.costs)

    def plan(self, state: SchedulerState, now: float) -> IterationPlan:
        """Plan the next iteration."""
        return self.policy.plan(self.view(state, now))

    def view(self, state: SchedulerState, now: float) -> WorkerView:
        """Build the policy's view."""
        return state.view(
            limits=self.limits,
            costs=self.present_costs,
            now=now,
            computes_prompts=self.computes_prompts,
        )

    def drafts(
        self, drafting: DraftLimits, state: SchedulerState, plan: IterationPlan
    ) -> tuple[tuple[RequestId, int], ...]:
        """Return how many tokens may be drafted of each request of the plan."""
        return drafting.allow(state.table, plan, self.costs, self.limits)

    def prompt_capacity(self, state: SchedulerState) -> PromptCapacity:
        """Return the share of time that decodes leave for prompts, and the speed of prompts.

        The share is 1 without decodes that have an objective.
        """
        table = state.table
        decodes = np.flatnonzero(table.is_decoding & (table.num_swapped == 0))
        allowed_s = float(np.min(table.tpot_s[decodes], initial=np.inf))
        work = IterationWork()
        note_decodes(work, table, decodes)
        costs, decodes_s = self.present_costs, self.costs.iteration_s(work)
        share = max(0.0, 1.0 - costs.iteration_s(work) / allowed_s)
        num_tokens = self.limits.max_tokens
        work.add_chunk(num_tokens, 0, is_last=True)
        token_s = (costs.iteration_s(work) - decodes_s) / num_tokens
        return PromptCapacity(share, 1.0 / max(token_s, _LEAST_TOKEN_S))

    def decode_delay(self, state: SchedulerState) -> DecodeDelay:
        """Return how a context delays all requests here; prompts count as decodes."""
        table, here = state.table, IterationWork()
        context_len = table.num_cached + table.num_remaining
        if len(context_len):
            here.add_decodes(len(context_len), int(context_len.sum()), int(context_len.max()))
        delay = delay_beside(here, self.costs)
        if not delay.longer_token_s:
            return DecodeDelay()
        return DecodeDelay(
            iteration_s=self.costs.iteration_s(here) if here.num_decodes else 0.0,
            even_len=delay.even_len,
            longer_token_s=delay.longer_token_s,
            longest_len=here.max_decode_context_len,
            num_longer=int(np.count_nonzero(context_len > delay.even_len)),
        )

    def completed(
        self,
        state: SchedulerState,
        *,
        now: float,
        duration_s: float,
        grammar_s: float | None = None,
        is_urgent: bool = False,
    ) -> None:
        """Note the end of an iteration and learn from its duration; 0 where it was not measured.

        `grammar_s`: of it, waiting for grammars; None: not measured. `is_urgent`: it ran within another one.
        """
        state.completed(now=now, duration_s=duration_s, is_urgent=is_urgent)
        if self.learner is not None and duration_s > 0.0 and (state.work.num_tokens or state.work.swapped_tokens):
            if (predicted_s := self.learner.iteration_s(state.work)) > 0.0:
                state.history.note_error(predicted_s, duration_s, now, is_urgent=is_urgent)
            self.learner.observe(state.work, duration_s, grammar_s)
            self.shown.note(state.work, duration_s, now)
