"""Workers that share a machine's cores: concurrent iterations slow each other down.

An iteration runs at the speed 1 / (1 + the slowdowns by all the others that run). When one begins or ends, the others
end later or earlier than they would have. Products of prompts and the reading of caches by decodes want different parts
of a machine, so each slowdown is for two kinds of work.
"""

from collections.abc import Callable

from lab.sim.config import Slowdowns
from lab.sim.event_queue import EventQueue


class Job:
    """A running iteration."""

    __slots__ = ("has_prompt", "left_s", "on_done", "speed")

    def __init__(self, left_s: float, has_prompt: bool, on_done: Callable[[], None]) -> None:
        self.left_s = left_s  # by itself
        self.has_prompt = has_prompt
        self.speed = 1.0
        self.on_done = on_done


class SharedCores:
    """The cores of one machine."""

    def __init__(self, event_queue: EventQueue, slowdowns: Slowdowns) -> None:
        self._event_queue = event_queue
        self._slowdowns = slowdowns
        self._jobs: list[Job] = []
        self._settled_s = 0.0  # the time at which `left_s` was settled
        self._version = 0  # of the schedule; the end of an earlier one is void

    def begin(self, duration_s: float, has_prompt: bool, on_done: Callable[[], None]) -> Job:
        """Begin an iteration that takes `duration_s` by itself; `on_done` is called at its end."""
        self._settle()
        job = Job(duration_s, has_prompt, on_done)
        self._jobs.append(job)
        self._plan()
        return job

    def stop(self, job: Job, *, part_s: float, urgent_s: float) -> tuple[float, float]:
        """Let a running iteration stand still, from the end of the part of `part_s` that it is in, for another one.

        Return when that begins and ends, at the present speed.
        """
        self._settle()
        begins_s = self._settled_s + max(job.left_s, 0.0) % part_s / job.speed
        job.left_s += urgent_s
        self._plan()
        return begins_s, begins_s + urgent_s / job.speed

    def _settle(self) -> None:
        now = self._event_queue.now
        for job in self._jobs:
            job.left_s -= (now - self._settled_s) * job.speed
        self._settled_s = now

    def _plan(self) -> None:
        self._version += 1
        num_prompts = sum(job.has_prompt for job in self._jobs)
        for job in self._jobs:
            others = num_prompts - job.has_prompt
            by_prompts = self._slowdowns.of(has_prompt=job.has_prompt, has_other_prompt=True)
            by_decodes = self._slowdowns.of(has_prompt=job.has_prompt, has_other_prompt=False)
            job.speed = 1.0 / (1.0 + others * by_prompts + (len(self._jobs) - 1 - others) * by_decodes)
        if self._jobs:
            soonest_s = min(job.left_s / job.speed for job in self._jobs)
            self._event_queue.after(max(soonest_s, 0.0), self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._settle()
        ended = min(self._jobs, key=lambda job: job.left_s / job.speed)
        self._jobs.remove(ended)
        self._plan()
        ended.on_done()
