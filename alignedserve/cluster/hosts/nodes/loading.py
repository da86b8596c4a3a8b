"""Asks the keepers how far the workers of their nodes have loaded their models, without waiting."""

import contextlib
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.cluster.hosts.members import Member
from alignedserve.process.loading_progress import Progress


class LoadingOfNodes:
    """The progress of nodes, as they last said."""

    def __init__(self) -> None:
        self._asked: dict[Any, str] = {}  # nodes by the calls of their keepers
        self._known: dict[str, list[Progress | None]] = {}

    def look(self, members: Iterable[Member]) -> list[Progress | None]:
        """Return the progress of every worker of these nodes, and ask anew."""
        answered = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0] if self._asked else []
        for reference in answered:
            name = self._asked.pop(reference)
            with contextlib.suppress(RayError):
                self._known[name] = ray.get(reference)
        names, asked = [], set(self._asked.values())
        for member in members:
            names.append(member.name)
            if member.name not in asked:
                self._asked[member.keeper.actor.progress.remote()] = member.name
        return [one for name in names for one in self._known.get(name, ())]
