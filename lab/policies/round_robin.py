"""Real-time and best-effort requests in turn, iteration by iteration (BROS, section 2.2; its baseline in section 7)."""

from dataclasses import dataclass

import numpy as np

from alignedserve.core.errors import ConfigError
from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import IterationPlan, WorkerView


@dataclass(frozen=True, slots=True)
class RoundRobinConfig:
    """The paper's value for BROS, as it gives none for the baseline."""

    batch_size: int = 128  # requests of one turn

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError("policy 'round_robin': batch_size must be at least 1")


class RoundRobin:
    """The policy: two first-come-first-served queues with continuous batching, served in alternate iterations.

    A class whose requests cannot continue passes its turn. An evicted request is recomputed (section 7.4.1). The page
    docs/policies/round_robin.md has an example.
    """

    def __init__(self, config: RoundRobinConfig) -> None:
        self._config = config
        self._is_real_time_next = True

    def plan(self, view: WorkerView) -> IterationPlan:
        for is_real_time in (self._is_real_time_next, not self._is_real_time_next):
            packer = self._turn(view, is_real_time)
            if packer.rows:
                self._is_real_time_next = not is_real_time
                return packer.plan()
        return self._earliest(view)

    def _turn(self, view: WorkerView, is_real_time: bool) -> Packer:
        table, packer = view.table, Packer(view)
        packer.num_places_left = min(packer.num_places_left, self._config.batch_size)
        is_mine = table.is_real_time == is_real_time
        self._add_decodes(packer, view, table.by_arrival(np.flatnonzero(is_mine & table.is_decoding)).tolist())
        waiting = np.flatnonzero(is_mine & ~table.is_decoding)
        for row in table.by_arrival(waiting, packer.num_places_left).tolist():
            num_tokens = packer.unchunked(row)
            if not num_tokens or not packer.add(row, num_tokens):
                break
        return packer

    @staticmethod
    def _add_decodes(packer: Packer, view: WorkerView, running: list[int]) -> None:
        while running and packer.num_places_left and packer.num_tokens_left:
            row = running.pop(0)
            packer.add_evicting(row, 1, running if view.can_evict else [])

    @staticmethod
    def _earliest(view: WorkerView) -> IterationPlan:
        packer = Packer(view)
        rows = view.table.by_arrival(np.arange(len(view.table))).tolist()
        holders = [row for row in rows[1:] if view.table.num_blocks[row] and view.can_evict]
        for row in rows[:1]:
            packer.add_evicting(row, packer.unchunked(row), holders)
        return packer.plan()
