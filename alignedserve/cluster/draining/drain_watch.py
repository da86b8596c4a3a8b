"""Tells the routers and the gateways what drains, and hears from them what is left. Never waits."""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.cluster.actor_factory import BATCHES
from alignedserve.cluster.draining.drains import Drains
from alignedserve.cluster.ray_node import has_ended
from alignedserve.core.errors import AlignedServeError
from alignedserve.process.addresses import is_gateway, is_router, router_of

logger = logging.getLogger(__name__)


class DrainWatch:
    """Repeats what drains with every look: a router or gateway that was restarted has forgotten it."""

    def __init__(self, drains: Drains) -> None:
        self._drains = drains
        self._asked: dict[str, tuple[Any, tuple[str, ...]]] = {}  # calls without an answer, with what they named
        self._left: dict[str, int] = {}
        self._told: dict[str, tuple[str, ...]] = {}  # what each router and gateway has answered to

    def look(self, actors: Mapping[str, Any]) -> list[str]:
        now = time.monotonic()
        for name in list(self._asked):
            self._take(name)
        over = self._drains.finished(now, self._left)
        workers, moved, draining = self._drains.workers, self._drains.due_to_move(now), self._drains.gateways
        routers = dict.fromkeys(
            (*(router_of(worker) for worker in workers), *(name for name in self._told if is_router(name)))
        )
        for router in routers:
            leaving, gone = (tuple(name for name in names if router_of(name) == router) for names in (workers, moved))
            self._ask(actors, router, leaving, leaving, gone)
        for name in dict.fromkeys((*draining, *(name for name in self._told if not is_router(name)))):
            self._ask(actors, name, (name,) if name in draining else (), name in draining)
        return over

    def _ask(self, actors: Mapping[str, Any], name: str, draining: tuple[str, ...], *call: object) -> None:
        if name not in actors:
            self._told.pop(name, None)
        elif name not in self._asked and (draining or self._told.get(name)):
            self._asked[name] = (actors[name].drain.remote(*call), draining)

    def _take(self, name: str) -> None:
        reference, draining = self._asked[name]
        try:
            if not has_ended(reference):
                return
            left = ray.get(reference)
        except (RayError, AlignedServeError, TimeoutError, ValueError) as error:  # it is restarted, and asked again
            logger.debug("%s does not drain now: %s", name, error)
            left = None
        del self._asked[name]
        names = {*self._drains.workers, *self._drains.gateways}
        self._left = {process: count for process, count in self._left.items() if process in names}
        if left is not None:
            self._told[name] = draining
            self._left |= left if is_router(name) else dict.fromkeys(draining, left)


class LastAnswers:
    """Closes the doors of a cluster and counts what is still open. Never waits."""

    def __init__(self) -> None:
        self._asked: dict[str, Any] = {}  # calls without an answer, by process
        self._open: dict[str, int] = {}

    @property
    def num_open(self) -> int:
        return sum(self._open.values())

    def look(self, actors: Mapping[str, Any]) -> bool:
        """Take the answers that have come and ask anew; return whether every process has answered that it is done.
        Asked again and again: a process that was restarted has forgotten it."""
        doors = [name for name in actors if is_gateway(name) or name == BATCHES]
        for name in doors:
            if name not in self._asked or self._take(name):
                self._ask(name, actors[name])
        return all(self._open.get(name) == 0 for name in doors)

    def _ask(self, name: str, actor: Any) -> None:
        with contextlib.suppress(RayError, ValueError):  # it is about to be started again
            self._asked[name] = (actor.pause if name == BATCHES else actor.close_intake).remote()

    def _take(self, name: str) -> bool:
        if not has_ended(self._asked[name]):
            return False
        try:
            self._open[name] = ray.get(self._asked[name]) or 0
        except (RayError, TimeoutError):
            self._open[name] = 0
        return True
