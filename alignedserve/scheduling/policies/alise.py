"""Shortest predicted remaining time first, by levels, with ageing and swapping (ALISE: Zhao and Wang, 2024)."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.priority_packing import Preemption, PriorityPacking
from alignedserve.scheduling.runtime_estimate import (
    RefreshedEstimate,
    RequestRuntimeModel,
    fit_request_runtime,
    remaining_output_len,
)
from alignedserve.scheduling.table import Floats, Ints


@dataclass(frozen=True, slots=True)
class AliseConfig:
    """Parameters of the paper, which gives no values: docs/policies/alise.md says how these were chosen."""

    num_levels: Annotated[int, Meta(ge=1)] = 8
    first_level_tokens: Annotated[int, Meta(ge=1)] = 16  # level 0 ends at the time of this many short decodes
    age_threshold_s: Annotated[float, Meta(gt=0)] = 60.0  # waiting that raises a request by one level (the paper's K)
    preemption: Preemption = Preemption.SWAP  # RECOMPUTE, DEFER: the paper's Figure 8
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01  # share of the blocks that newcomers leave free
    runtime: RequestRuntimeModel | None = None  # T0, alpha, beta; None: probed from the worker's cost model


class Alise:
    """The policy: levels of predicted remaining time; better levels take memory from worse ones.

    The page docs/policies/alise.md has the formulas and an example.
    """

    def __init__(self, config: AliseConfig) -> None:
        self._config = config
        self._runtime = RefreshedEstimate(fit_request_runtime, config.runtime)

    def plan(self, view: WorkerView) -> IterationPlan:
        config, table = self._config, view.table
        runtime = self._runtime.of(view.costs)
        num_left, num_overruns = remaining_output_len(table)
        remaining_s = runtime.remaining_s(table, num_left)
        level = self._base_level(remaining_s / (config.first_level_tokens * runtime.decode_s), num_overruns)
        waited_s = np.maximum(view.now - table.arrival_s - table.service_s, 0.0)
        level = np.maximum(level - (waited_s // config.age_threshold_s).astype(np.int64), 0)
        wait_s = self._estimated_wait_s(level, remaining_s, waited_s)
        return PriorityPacking(view, level, wait_s, preemption=config.preemption, watermark=config.watermark).plan()

    def _base_level(self, by_first: Floats, num_overruns: Ints) -> Ints:
        by_time = np.frexp(by_first)[1].astype(np.int64)
        return np.clip(np.maximum(by_time, num_overruns), 0, self._config.num_levels - 1)

    def _estimated_wait_s(self, level: Ints, remaining_s: Floats, waited_s: Floats) -> Floats:
        by_level = np.bincount(level, weights=remaining_s, minlength=self._config.num_levels)
        better_s = np.cumsum(by_level) - by_level
        threshold_s = self._config.age_threshold_s
        promoted_s = level * threshold_s - waited_s % threshold_s
        wait_s: Floats = np.minimum(better_s[level], np.maximum(promoted_s, 0.0))
        return wait_s
