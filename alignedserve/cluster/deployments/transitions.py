"""Starts and ends of a deployment's processes, one look at a time: the driver waits for none of them."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.cluster.ray_polls import have_all_ended
from alignedserve.cluster.running_cluster import START_TIMEOUT_S, start_failure
from alignedserve.cluster.start_observer import LoggingObserver, Patience
from alignedserve.core.errors import ResourceError
from alignedserve.process.loading_progress import Progress

logger = logging.getLogger(__name__)

_STOP_S = 5.0  # for processes to free what they have
_GONE_S = 10.0  # for those that were killed


class Starting:
    """A deployment whose processes come up."""

    def __init__(self, actors: Mapping[str, Any], progress: Callable[[], Sequence[Progress | None]]) -> None:
        """`progress`: returns how far each worker has loaded the model."""
        self._asked = {actor.failure.remote(): name for name, actor in actors.items()}
        self._patience = Patience(progress, START_TIMEOUT_S, LoggingObserver())

    def look(self) -> str | None:
        """Return why it does not start; None: it does, or has (see `is_over`)."""
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        for reference in answered:
            name = self._asked.pop(reference)
            try:
                failure = start_failure(reference, name)
            except ResourceError as error:
                return str(error)
            if failure is not None:
                return str(failure)
        if self._asked and self._patience.is_over():
            return f"{', '.join(self._asked.values())} did not start, without progress for {START_TIMEOUT_S:.0f} s"
        return None

    @property
    def is_over(self) -> bool:
        """Return whether all processes are up."""
        return not self._asked


class Ending:
    """A deployment whose processes end: asked first, then killed, until their memory is free."""

    def __init__(self, name: str, actors: Mapping[str, Any], remove: Callable[[], bool]) -> None:
        """`name`: of its model. `remove`: removes what they leave; returns whether nothing is held any more."""
        self._name = name
        self._actors = actors
        self._remove = remove
        self._stops: list[Any] = []
        for actor in actors.values():
            with contextlib.suppress(RayError, ValueError):
                self._stops.append(actor.stop.remote())
        self._kills_s: float | None = time.monotonic() + _STOP_S
        self._gone_s = 0.0

    def look(self) -> bool:
        """Return whether it is over."""
        if self._kills_s is not None:
            if not have_all_ended(self._stops) and time.monotonic() < self._kills_s:
                return False
            self._kill()
            return False
        is_gone = self._remove()
        if not is_gone and time.monotonic() < self._gone_s:
            return False
        if not is_gone:
            logger.warning("memory of %s is not free yet", self._name)
        return True

    def _kill(self) -> None:
        for actor in self._actors.values():
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)
        self._kills_s, self._gone_s = None, time.monotonic() + _GONE_S
