"""A rolling restart: every worker in turn drains, is started anew, and serves again before the next one drains.

Of each: 1. It drains: it gets nothing new, and what it has is finished, or goes on elsewhere after a while. 2. Its
process ends, and Ray starts it again. 3. Its router knows it again. One whose model ends meanwhile is passed over.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, Protocol

import ray
from ray.exceptions import RayError

from alignedserve.cluster.deployments.orders import (
    Answer,
    DeploymentReport,
    OrderDone,
    OrderRefused,
    Remark,
    RestartWorkers,
    problem_of,
)
from alignedserve.cluster.draining.drains import Drains, ProcessDrain
from alignedserve.cluster.ray_node import has_ended
from alignedserve.core.errors import AlignedServeError
from alignedserve.process.addresses import deployment_of, router_of

logger = logging.getLogger(__name__)

RETURN_S = 600.0  # for a worker to load its model and serve again


class Workers(Protocol):
    """The workers of a cluster, as a restart needs them. Nothing waits."""

    def begin_drain(self, name: str, within_s: float) -> None:
        """Give a worker nothing new; what it still has after that time goes elsewhere."""

    def is_draining(self, name: str) -> bool:
        """Return whether a worker that was to drain does so: not where its node is lost, or its drain undone."""

    def has_model(self, name: str) -> bool:
        """Return whether a worker's model has processes: one that falls asleep or is removed has none any more."""

    def end_drain(self, name: str) -> None:
        """Forget that a worker was to drain."""

    def restart(self, name: str) -> None:
        """End a worker's process, which is started again, and let it get work again."""

    def registration(self, name: str) -> str | None:
        """Return what tells a worker's registration at its router from the next one; None: not known now."""


class RestartStep(Enum):
    """How far the current worker has come in its restart."""

    DRAINING = auto()
    RETURNING = auto()


class RestartEnd(NamedTuple):
    """The end of a restart."""

    text: str
    has_failed: bool = False


class RollingRestart:
    """Restarts workers one after the other. `look` takes the next step when it can."""

    def __init__(
        self, names: Sequence[str], within_s: Callable[[str], float], workers: Workers, say: Callable[[str], None]
    ) -> None:
        """`within_s`: in which requests of a worker may finish there. `say`: is told of every step."""
        self._waiting = list(names)
        self._num_restarted = 0
        self._within_s = within_s
        self._workers = workers
        self._say = say
        self._current = ""
        self._step = RestartStep.RETURNING
        self._former: str | None = None  # registration of the current one
        self._began_s = 0.0  # the step

    @property
    def names(self) -> frozenset[str]:
        """Return the workers whose drain is no end: the present one, and those still to come."""
        return frozenset((self._current, *self._waiting))

    def look(self, drained: Collection[str], now: float) -> RestartEnd | None:
        """Go on; return how it has ended, once it has. `drained`: workers whose work is gone."""
        if self._current and not self._workers.has_model(self._current):
            self._workers.end_drain(self._current)
            self._say(f"{self._current} is gone with its model")
        elif self._current and not self._is_through(drained, now):
            if self._step is RestartStep.DRAINING and not self._workers.is_draining(self._current):
                return RestartEnd(f"{self._current} drains no more; the others were left as they are", has_failed=True)
            if now - self._began_s > RETURN_S and self._step is RestartStep.RETURNING:
                return RestartEnd(
                    f"{self._current} does not serve again; the others were left as they are", has_failed=True
                )
            return None
        self._waiting = [name for name in self._waiting if self._workers.has_model(name)]
        if not self._waiting:
            few = {0: "No worker was restarted: their models have ended.", 1: "1 worker was restarted."}
            several = f"{self._num_restarted} workers were restarted, one after the other."
            return RestartEnd(few.get(self._num_restarted, several))
        self._current = self._waiting.pop(0)
        self._step, self._began_s = RestartStep.DRAINING, now
        self._workers.begin_drain(self._current, self._within_s(self._current))
        self._say(f"{self._current} drains")
        return None

    def _is_through(self, drained: Collection[str], now: float) -> bool:
        registration = self._workers.registration(self._current)
        if self._step is RestartStep.DRAINING:
            self._former = registration or self._former
            if self._current in drained:
                self._step, self._began_s = RestartStep.RETURNING, now
                self._workers.restart(self._current)
            return False
        if registration in (None, self._former):
            return False
        self._say(f"{self._current} serves again after {now - self._began_s:.1f} s")
        self._num_restarted += 1
        return True


class Registrations:
    """The registrations of workers, as their routers last told. Never waits."""

    def __init__(self) -> None:
        self._asked: dict[str, Any] = {}  # calls without an answer, by router
        self._known: dict[str, Mapping[str, str]] = {}

    def look(self, actors: Mapping[str, Any], worker: str) -> str | None:
        """Return that of a worker, None where it has none, or its router does not answer; and ask anew."""
        router = router_of(worker)
        if router in self._asked:
            self._take(router)
        if router not in self._asked and router in actors:
            self._asked[router] = actors[router].registrations.remote()
        return self._known.get(router, {}).get(worker)

    def _take(self, router: str) -> None:
        if not has_ended(self._asked[router]):
            return
        try:
            self._known[router] = ray.get(self._asked.pop(router))
        except (RayError, AlignedServeError, TimeoutError):  # it is restarted, and asked again
            self._known.pop(router, None)


class WorkerRestarts:
    """The restart that goes on, if there is one. Nothing waits."""

    def __init__(
        self, drains: Drains, actors: Callable[[], Mapping[str, Any]], answer: Callable[[str, Answer], None]
    ) -> None:
        """`actors`: all of the cluster. `answer`: gives the giver of an order an answer, by the order's id."""
        self._drains = drains
        self._actors = actors
        self._answer = answer
        self._registrations = Registrations()
        self._restart: RollingRestart | None = None
        self._order_id = ""

    def order(self, order_id: str, order: RestartWorkers, deployments: Iterable[DeploymentReport]) -> None:
        """Begin to carry out an order, unless that was begun; refuse it while another one is."""
        if self._restart is not None and order_id == self._order_id:
            return
        names = [
            name for deployment in deployments if order.model in (None, deployment.name) for name in deployment.workers
        ]
        able = [name for name in names if name not in self._drains.workers]
        problem = self._problem_of(order, able)
        if problem is not None:
            self._answer(order_id, OrderRefused(problem))
            return
        logger.info("ordered: restart %s", ", ".join(able))
        self._order_id = order_id
        within_s = partial(_time_for, names=names, within_s=order.drains_within_s)
        self._restart = RollingRestart(able, within_s, self, partial(self._say, order_id))

    def _problem_of(self, order: RestartWorkers, able: Sequence[str]) -> str | None:
        if self._restart is not None:
            return "the workers are being restarted already"
        model = "" if order.model is None else f" of a model that is served as {order.model}"
        return problem_of(order) or (None if able else f"there are no workers{model}, or all of them drain")

    @property
    def goes_on(self) -> bool:
        return self._restart is not None

    def takes(self, name: str) -> bool:
        return self._restart is not None and name in self._restart.names

    def look(self, drained: Collection[str]) -> None:
        """Go on. `drained`: workers whose work is gone, and that have been taken."""
        over = self._restart.look(drained, time.monotonic()) if self._restart is not None else None
        if over is not None:
            self._restart = None
            self._answer(self._order_id, OrderRefused(over.text) if over.has_failed else OrderDone(over.text))

    def _say(self, order_id: str, text: str) -> None:
        logger.info("%s", text)
        self._answer(order_id, Remark(text))

    # --- as Workers

    def begin_drain(self, name: str, within_s: float) -> None:
        self._drains.begin(name, ProcessDrain((name,), (), time.monotonic() + within_s))

    def is_draining(self, name: str) -> bool:
        return name in self._drains.workers

    def has_model(self, name: str) -> bool:
        return router_of(name) in self._actors()

    def end_drain(self, name: str) -> None:
        self._drains.end(name)

    def restart(self, name: str) -> None:
        self.end_drain(name)
        with contextlib.suppress(RayError, ValueError, KeyError):  # its node is lost: it will not return
            ray.kill(self._actors()[name], no_restart=False)

    def registration(self, name: str) -> str | None:
        return self._registrations.look(self._actors(), name)


def _time_for(name: str, *, names: Collection[str], within_s: float) -> float:
    kinds = [(worker.partition("-")[0], deployment_of(worker)) for worker in names]
    return within_s if kinds.count((name.partition("-")[0], deployment_of(name))) > 1 else 0.0
