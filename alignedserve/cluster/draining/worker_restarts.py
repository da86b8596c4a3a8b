"""Takes orders to restart the workers of a running cluster, and carries them out, on one host or several."""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.cluster.deployments.orders import (
    Answer,
    DeploymentReport,
    Done,
    Refused,
    Remark,
    RestartWorkers,
    problem_of,
)
from alignedserve.cluster.draining.drains import Draining, Drains
from alignedserve.cluster.draining.rolling_restart import Registrations, RollingRestart
from alignedserve.process.addresses import deployment_of

logger = logging.getLogger(__name__)


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
        names = [name for one in deployments if order.model in (None, one.name) for name in one.workers]
        able = [name for name in names if name not in self._drains.workers]
        problem = self._problem_of(order, able)
        if problem is not None:
            self._answer(order_id, Refused(problem))
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

    def takes(self, name: str) -> bool:
        """Return whether the end of this worker's drain is not the worker's."""
        return self._restart is not None and name in self._restart.names

    def look(self, drained: Collection[str]) -> None:
        """Go on. `drained`: workers of which nothing is left, and that are taken."""
        over = self._restart.look(drained, time.monotonic()) if self._restart is not None else None
        if over is not None:
            self._restart = None
            self._answer(self._order_id, Refused(over.text) if over.has_failed else Done(over.text))

    def _say(self, order_id: str, text: str) -> None:
        logger.info("%s", text)
        self._answer(order_id, Remark(text))

    # --- as Workers

    def begin_drain(self, name: str, within_s: float) -> None:
        """See Workers."""
        self._drains.begin(name, Draining((name,), (), time.monotonic() + within_s))

    def restart(self, name: str) -> None:
        """See Workers."""
        self._drains.end(name)
        with contextlib.suppress(RayError, ValueError, KeyError):  # its node is lost: it will not return
            ray.kill(self._actors()[name], no_restart=False)

    def registration(self, name: str) -> str | None:
        """See Workers."""
        return self._registrations.look(self._actors(), name)


def _time_for(name: str, *, names: Collection[str], within_s: float) -> float:
    """Return the time in which requests of a worker may finish there; none where new ones would wait for it."""
    kinds = [(one.partition("-")[0], deployment_of(one)) for one in names]
    return within_s if kinds.count((name.partition("-")[0], deployment_of(name))) > 1 else 0.0
