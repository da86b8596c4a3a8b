"""First come, first served, class by class (vLLM with priorities)."""

from functools import partial

import numpy as np
from typing_extensions import override

from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policies.fcfs import Fcfs
from alignedserve.scheduling.policy import WorkerView
from alignedserve.scheduling.table import Bools, Ints


class FcfsClassed(Fcfs):
    """The policy: `fcfs` with real-time requests before best-effort ones.

    Prompts of best effort wait while there is a real-time request. A real-time request that finds no blocks preempts
    the last best-effort requests to arrive.
    """

    @override
    def _able(self, view: WorkerView) -> Bools:
        able = super()._able(view)
        real_time: Bools = able & view.table.is_real_time
        return real_time if real_time.any() else able

    @override
    def _in_order(self, view: WorkerView, rows: Ints, at_most: int | None = None) -> Ints:
        is_real_time = view.table.is_real_time[rows]
        classes = rows[is_real_time], rows[~is_real_time]
        return np.concatenate([view.table.by_arrival(members, at_most) for members in classes])[:at_most]

    @override
    def _has_room(self, packer: Packer, view: WorkerView, row: int) -> bool:
        missing = packer.blocks_needed(row, packer.remaining(row)) + self._watermark(view) - packer.num_free
        if missing <= 0:
            return True
        victims = self._victims(packer, view, row)
        if packer.num_free + packer.num_freed_by(victims) == view.memory.num_blocks:
            missing -= self._watermark(view)
        return packer.displace(victims, missing, partial(self._preempt, packer, view))

    def _victims(self, packer: Packer, view: WorkerView, row: int) -> list[int]:
        table = view.table
        if not (table.is_real_time[row] and view.can_evict):
            return []
        holders = table.by_arrival(np.flatnonzero((table.num_blocks > 0) & ~table.is_real_time)).tolist()
        return [other for other in holders if not packer.is_evicted(other)]
