"""Tells the routers and the gateways what drains, and hears from them what is left. Never waits."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError

from alignedserve.cluster.actor_factory import BATCHES
from alignedserve.cluster.desired import WantedCluster
from alignedserve.cluster.ray_node import OpenCalls
from alignedserve.process.addresses import is_gateway, is_router, router_of


class DrainWatch:
    """Repeats what drains with every look: a router or gateway that was restarted has forgotten it."""

    def __init__(self, wanted: WantedCluster) -> None:
        self._wanted = wanted
        self._calls = OpenCalls()
        self._named: dict[str, tuple[str, ...]] = {}  # by each call
        self._told: dict[str, tuple[str, ...]] = {}  # what each router and gateway has answered to
        self._registering = OpenCalls()
        self._registrations: dict[str, Mapping[str, str]] = {}  # of workers, by router
        self.left: dict[str, int] = {}  # requests of each process that has answered since its drain

    @property
    def registrations(self) -> dict[str, str]:
        return {worker: number for known in self._registrations.values() for worker, number in known.items()}

    def look(self, actors: Mapping[str, Any]) -> None:
        self._look_at_restart(actors)
        for name, left in self._calls.answers().items():
            if left is not None:  # else it is restarted, and asked again
                self._told[name] = self._named[name]
                self.left |= left if is_router(name) else dict.fromkeys(self._named[name], left)
        workers, moved = self._wanted.workers, self._wanted.due_to_move(time.monotonic())
        gateways = self._wanted.gateways
        self.left = {process: count for process, count in self.left.items() if process in {*workers, *gateways}}
        routers = dict.fromkeys((*map(router_of, workers), *filter(is_router, self._told)))
        for router in routers:
            leaving, gone = (tuple(name for name in names if router_of(name) == router) for names in (workers, moved))
            self._ask(actors, router, leaving, leaving, gone)
        for name in dict.fromkeys((*gateways, *(name for name in self._told if not is_router(name)))):
            self._ask(actors, name, (name,) if name in gateways else (), name in gateways)

    def _ask(self, actors: Mapping[str, Any], name: str, draining: tuple[str, ...], *call: object) -> None:
        if name not in actors:
            self._told.pop(name, None)
        elif name not in self._calls and (draining or self._told.get(name)):
            self._calls.ask(name, actors[name].drain.remote(*call))
            self._named[name] = draining

    def _look_at_restart(self, actors: Mapping[str, Any]) -> None:
        restart = self._wanted.restart
        self._registrations |= {router: known or {} for router, known in self._registering.answers().items()}
        if restart is None:
            self._registrations.clear()
        elif (router := router_of(restart.current)) in actors and router not in self._registering:
            self._registering.ask(router, actors[router].registrations.remote())


class LastAnswers:
    """Closes the doors of a cluster and counts what is still open. Never waits."""

    def __init__(self) -> None:
        self._calls = OpenCalls()
        self._open: dict[str, int] = {}  # by process

    @property
    def num_open(self) -> int:
        return sum(self._open.values())

    def look(self, actors: Mapping[str, Any]) -> bool:
        """Take the answers that have come and ask anew; return whether every process has answered that it is done.
        Asked again and again: a process that was restarted has forgotten it."""
        doors = [name for name in actors if is_gateway(name) or name == BATCHES]
        self._open |= {name: count or 0 for name, count in self._calls.answers().items()}
        for name in doors:
            if name not in self._calls:
                with contextlib.suppress(RayError, ValueError):  # it is about to be started again
                    actor = actors[name]
                    self._calls.ask(name, (actor.pause if name == BATCHES else actor.close_intake).remote())
        return all(self._open.get(name) == 0 for name in doors)
