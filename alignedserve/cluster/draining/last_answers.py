"""The end of a cluster that drains: nothing new comes in, and what is open is answered."""

import contextlib
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.cluster.actor_factory import BATCHES
from alignedserve.cluster.ray_polls import has_ended
from alignedserve.process.addresses import is_gateway


class LastAnswers:
    """Closes the doors of a cluster and counts what is still open. Never waits."""

    def __init__(self) -> None:
        self._asked: dict[str, Any] = {}  # calls without an answer, by process
        self._open: dict[str, int] = {}

    @property
    def num_open(self) -> int:
        """Return how many requests were open when each gateway last answered."""
        return sum(self._open.values())

    def look(self, actors: Mapping[str, Any]) -> bool:
        """Take the answers that have come and ask anew; return whether every process has answered that it is done.

        Asked again and again: a process that was restarted has forgotten it.
        """
        doors = [name for name in actors if is_gateway(name) or name == BATCHES]
        for name in doors:
            if name not in self._asked or self._take(name):
                self._ask(name, actors[name])
        return all(self._open.get(name) == 0 for name in doors)

    def _ask(self, name: str, actor: Any) -> None:
        with contextlib.suppress(RayError, ValueError):  # it is about to be started again
            self._asked[name] = (actor.pause if name == BATCHES else actor.close_intake).remote()

    def _take(self, name: str) -> bool:
        """Return whether a process has answered; one that died has nothing open any more."""
        if not has_ended(self._asked[name]):
            return False
        try:
            self._open[name] = ray.get(self._asked[name]) or 0
        except (RayError, TimeoutError):
            self._open[name] = 0
        return True
