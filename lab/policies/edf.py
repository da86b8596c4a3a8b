"""Earliest deadline first, with prompts in chunks beside decodes: the baseline by deadline of QoServe's authors."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.table import Floats, RequestTable
from lab.policies.chunked_packing import ChunkedPacking, class_of, order_of


@dataclass(frozen=True, slots=True)
class EdfConfig:
    """Parameters of Sarathi-Serve, whose chunks it has."""

    token_budget: Annotated[int, Meta(ge=1)] = 512  # of an iteration
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01  # share of the blocks that a new prompt has to leave free


class Edf:
    """The policy: requests by the time at which their next token is due, those without any such time after them.

    Decodes go before prompts, as under Sarathi-Serve. Blocks are taken from best-effort requests first, whatever their
    deadline. The page docs/policies/edf.md has the formulas and an example.
    """

    def __init__(self, config: EdfConfig) -> None:
        self._config = config

    def plan(self, view: WorkerView) -> IterationPlan:
        due_s, level = due_times_s(view.table), class_of(view)
        order = order_of(view, due_s, group=np.where(np.isfinite(due_s), 0, 1 + level), level=level)
        budget, watermark = self._config.token_budget, self._config.watermark
        return ChunkedPacking(view, order, token_budget=budget, watermark=watermark).plan()


def due_times_s(table: RequestTable) -> Floats:
    """Return when the next token of every row is due, or without such an objective its last one; inf without any."""
    has_begun = table.num_generated > 0
    next_s = np.where(has_begun, table.last_token_s + table.tpot_s, table.arrival_s + table.ttft_s)
    due_s: Floats = np.where(np.isfinite(next_s), next_s, table.arrival_s + table.deadline_s)
    return due_s
