"""Workers that share a machine's cores: concurrent iterations slow each other down.

Each of k concurrent iterations runs at the speed 1 / (1 + slowdown * (k - 1)). When one begins or ends, the others end
later or earlier than they would have.
"""

from collections.abc import Callable

from alignedserve.sim.event_queue import EventQueue


class _Job:
    """A running iteration."""

    __slots__ = ("left_s", "on_done")

    def __init__(self, left_s: float, on_done: Callable[[], None]) -> None:
        self.left_s = left_s  # by itself
        self.on_done = on_done


class SharedCores:
    """One machine. `slowdown`: share of its own time by which each concurrent iteration prolongs an iteration."""

    def __init__(self, event_queue: EventQueue, slowdown: float) -> None:
        self._event_queue = event_queue
        self._slowdown = slowdown
        self._jobs: list[_Job] = []
        self._settled_s = 0.0  # time as of which `left_s` is valid
        self._version = 0  # of the schedule; the end of an earlier one is void

    def begin(self, duration_s: float, on_done: Callable[[], None]) -> None:
        """Begin an iteration that takes `duration_s` by itself; `on_done` is called at its end."""
        self._settle()
        self._jobs.append(_Job(duration_s, on_done))
        self._plan()

    def _speed(self) -> float:
        return 1.0 / (1.0 + self._slowdown * (len(self._jobs) - 1))

    def _settle(self) -> None:
        now = self._event_queue.now
        if self._jobs:
            done_s = (now - self._settled_s) * self._speed()
            for job in self._jobs:
                job.left_s -= done_s
        self._settled_s = now

    def _plan(self) -> None:
        """Schedule the end of the next iteration under the current load."""
        self._version += 1
        if self._jobs:
            soonest_s = min(job.left_s for job in self._jobs)
            self._event_queue.after(max(soonest_s, 0.0) / self._speed(), self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._settle()
        ended = min(self._jobs, key=lambda job: job.left_s)
        self._jobs.remove(ended)
        self._plan()
        ended.on_done()
