"""Sarathi-Serve: chunked prompts beside decodes that never stall (Agrawal et al., OSDI 2024); also class by class."""

from dataclasses import dataclass

import numpy as np

from alignedserve.scheduling.policy import IterationPlan, WorkerView
from lab.policies.chunked_packing import ChunkedPacking, class_of, order_of


@dataclass(frozen=True, slots=True)
class SarathiConfig:
    """The paper's values for a strict SLO."""

    token_budget: int = 512  # of an iteration; 2 048 where the SLO is relaxed
    watermark: float = 0.01  # share of the blocks that a new prompt has to leave free (vLLM, on which it is built)


class Sarathi:
    """The policy: decodes first, then prompts that have begun, then new ones, chunked by the token budget.

    A prompt has blocks for all its tokens from its first chunk on. When a decode has no block left, the last to arrive
    is preempted and recomputed. The page docs/policies/sarathi.md has an example.

    Classed, all of this holds for the real-time requests first, and for the best-effort ones with what those leave: a
    real-time request that finds no blocks takes them from the last best-effort one to arrive.
    """

    def __init__(self, config: SarathiConfig, *, is_classed: bool = False) -> None:
        self._config = config
        self._is_classed = is_classed

    def plan(self, view: WorkerView) -> IterationPlan:
        num_rows = len(view.table)
        level = class_of(view) if self._is_classed else np.zeros(num_rows, np.int64)
        is_new = np.where(view.table.num_blocks > 0, 0.0, 1.0)
        order = order_of(view, is_new, group=level, level=level, keep=np.zeros(num_rows))
        budget, watermark = self._config.token_budget, self._config.watermark
        return ChunkedPacking(view, order, token_budget=budget, watermark=watermark).plan()
