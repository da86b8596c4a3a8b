"""Shortest predicted remaining time first in each class, with prompts in chunks beside decodes.

The baseline by length of QoServe's authors, who order by what remains of the prompt; here the predicted answer counts
as well, as in ALISE.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.runtime_estimate import (
    RefreshedEstimate,
    RequestRuntimeModel,
    fit_request_runtime,
    remaining_output_len,
)
from lab.policies.chunked_packing import ChunkedPacking, class_of, order_of


@dataclass(frozen=True, slots=True)
class SrptConfig:
    """Parameters of Sarathi-Serve, whose chunks it has, and of the estimate."""

    token_budget: Annotated[int, Meta(ge=1)] = 512  # of an iteration
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01  # share of the blocks that a new prompt has to leave free
    runtime: RequestRuntimeModel | None = None  # T0, alpha, beta; None: probed from the worker's cost model


class Srpt:
    """The policy: real-time requests, then best-effort ones, each by the time that they are predicted to need.

    Decodes go before prompts, as under Sarathi-Serve. The page docs/policies/srpt.md has the formulas and an example.
    """

    def __init__(self, config: SrptConfig) -> None:
        self._config = config
        self._runtime = RefreshedEstimate(fit_request_runtime, config.runtime)

    def plan(self, view: WorkerView) -> IterationPlan:
        num_left, _ = remaining_output_len(view.table)
        remaining_s = self._runtime.of(view.costs).remaining_s(view.table, num_left)
        level = class_of(view)
        order = order_of(view, remaining_s, group=level, level=level)
        budget, watermark = self._config.token_budget, self._config.watermark
        return ChunkedPacking(view, order, token_budget=budget, watermark=watermark).plan()
