"""Workers that share a machine's cores: whoever computes beside others takes longer.

All who compute at one time go at the speed 1 / (1 + slowdown * (k - 1)), k being how many they are. When one begins
or ends, the others' iterations end earlier or later than they would have.
"""

from collections.abc import Callable

from alignedserve.sim.event_queue import EventQueue


class _Job:
    """An iteration under way."""

    __slots__ = ("left_s", "on_done")

    def __init__(self, left_s: float, on_done: Callable[[], None]) -> None:
        self.left_s = left_s  # that it would still take alone
        self.on_done = on_done


class SharedCores:
    """One machine. `slowdown`: by how much of its time alone an iteration takes longer for each other one."""

    def __init__(self, event_queue: EventQueue, slowdown: float) -> None:
        self._event_queue = event_queue
        self._slowdown = slowdown
        self._jobs: list[_Job] = []
        self._settled_s = 0.0  # up to when `left_s` is right
        self._version = 0  # of the plan; an earlier one's end is void

    def begin(self, duration_s: float, on_done: Callable[[], None]) -> None:
        """An iteration that would take so long alone begins now. `on_done` is called at its end."""
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
        """Put down when the next one ends, as things are."""
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
