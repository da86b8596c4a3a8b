"""Timing of work on a device, by the device's own clock where it has one, as the host only enqueues the work."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from alignedserve.runtime.device.devices import CPU, CUDA

_CUDA: Any = torch.cuda

# More than any cache between a device's memory and its cores.
_COLD_BYTES = {CPU: 64 << 20, CUDA: 256 << 20}
# Cycles, about half a millisecond: time for the host to enqueue the work of one measurement.
_HEAD_START = 1_000_000
_LEAST_ROUNDS = 3

Work = Callable[[], object]


class DeviceTimer:
    """Measures seconds of work on one device: medians of rounds, each with cold caches.

    On a GPU it is the time between two events on a stream that is blocked until the host has enqueued the work, so that
    the host's time does not count (except for work that waits for the device in between). On a CPU it is the clock's.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        num_rounds: int = 20,
        warm_ups: int = 1,
        budget_s: float = 0.5,
        cold_bytes: int | None = None,
    ) -> None:
        """`budget_s`: time per work; slow work gets fewer rounds. `cold_bytes`: written before each work; 0 leaves the
        caches as they are."""
        self._device = device
        self._num_rounds = num_rounds
        self._warm_ups = warm_ups
        self._budget_s = budget_s
        size = _COLD_BYTES[device.type] if cold_bytes is None else cold_bytes
        self._elsewhere = torch.zeros(size // 4, dtype=torch.float32, device=device)

    def seconds(self, work: Work) -> float:
        """Measure one work."""
        return self.by_turns([work])[0]

    def by_turns(self, works: Sequence[Work]) -> list[float]:
        """Measure each, one after the other in every round, so that a disturbance affects all; warm-ups come first."""
        for _ in range(self._warm_ups):
            self._round(works)
        first = self._round(works)
        slowest = max(max(first), 1e-9)
        num_rounds = min(self._num_rounds, max(_LEAST_ROUNDS, int(self._budget_s / slowest)))
        rounds = [first, *(self._round(works) for _ in range(num_rounds - 1))]
        return [statistics.median(seen) for seen in zip(*rounds, strict=True)]

    def _round(self, works: Sequence[Work]) -> list[float]:
        if self._device.type != CUDA:
            return [self._clocked(work) for work in works]
        events = [self._queued(work) for work in works]
        torch.cuda.synchronize(self._device)
        return [float(begin.elapsed_time(end)) / 1e3 for begin, end in events]

    def _clocked(self, work: Work) -> float:
        self._fill_caches()
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def _queued(self, work: Work) -> tuple[Any, Any]:
        begin, end = _CUDA.Event(enable_timing=True), _CUDA.Event(enable_timing=True)
        with torch.cuda.device(self._device):
            self._fill_caches()
            _CUDA._sleep(_HEAD_START)
            begin.record()
            work()
            end.record()
        return begin, end

    def _fill_caches(self) -> None:
        if self._elsewhere.numel():
            self._elsewhere.add_(1.0)
