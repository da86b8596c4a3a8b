"""Whoever is silent for too long is ended, so that Ray starts it again: a stopped process holds its locks, sockets and
requests for as long as it is left alone. A process that ends is Ray's business; one that is starting has all its time.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


@dataclass(slots=True)
class _Watch:
    actor: Any
    question: Any  # what it has been asked and not answered
    num_looks: int = 0  # since then
    is_up: bool = False  # it has answered since it was started


class Watchdog:
    """`start` once, `stop` once, before Ray is shut down. Works in a thread of its own."""

    def __init__(self, actors: Mapping[str, Any], hang_timeout_s: float) -> None:
        self._watches = {name: _Watch(actor, actor.failure.remote()) for name, actor in actors.items()}
        # Looks and not seconds: while this process is stopped itself, nobody else is silent.
        self._max_looks = max(1, round(hang_timeout_s / _LOOK_S))
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End no more of them."""
        self._is_stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_stopping.wait(_LOOK_S):
            for name, watch in self._watches.items():
                self._look(name, watch)

    def _look(self, name: str, watch: _Watch) -> None:
        watch.num_looks += 1
        try:
            answered, _ = ray.wait([watch.question], timeout=0)
            if answered:
                watch.is_up = _is_up(watch.question)
            elif not watch.is_up or watch.num_looks <= self._max_looks:
                return
            else:
                logger.error("%s has answered nothing for %d looks and is started again", name, self._max_looks)
                ray.kill(watch.actor, no_restart=False)
                watch.is_up = False
            watch.question, watch.num_looks = watch.actor.failure.remote(), 0
        except (RayError, ValueError):  # Ray itself is in trouble; what comes of it is not ours to mend
            logger.debug("%s cannot be watched now", name, exc_info=True)


def _is_up(question: Any) -> bool:
    try:
        ray.get(question)
    except RayActorError:
        return False  # it has ended, and Ray starts it again
    return True
