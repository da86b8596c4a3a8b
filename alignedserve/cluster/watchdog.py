"""Kills actors that do not answer for too long, so that Ray restarts them: a stopped process holds its requests."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

logger = logging.getLogger(__name__)

_CHECK_S = 1.0


@dataclass(slots=True)
class _WatchedActor:
    actor: Any
    ping: Any  # the call without an answer
    num_checks: int = 0  # since that call
    is_up: bool = False  # it has answered since it started


class Watchdog:
    """Checks actors on a thread of its own. `start` once, `stop` once, before Ray is shut down."""

    def __init__(self, actors: Mapping[str, Any], hang_timeout_s: float) -> None:
        self._actors = {name: _WatchedActor(actor, actor.failure.remote()) for name, actor in actors.items()}
        # Checks, not seconds: time during which this process itself is stopped does not count.
        self._max_checks = max(1, round(hang_timeout_s / _CHECK_S))
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def watch(self, name: str, actor: Any) -> None:
        """Check one more."""
        watched = _WatchedActor(actor, actor.failure.remote())
        self._actors = {**self._actors, name: watched}  # a new one, as the thread reads the other

    def forget(self, name: str) -> None:
        """Check this one no more, but for a check that is under way."""
        self._actors = {known: watched for known, watched in self._actors.items() if known != name}

    def stop(self) -> None:
        """Stop the thread; no actor is killed afterwards."""
        self._is_stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_stopping.wait(_CHECK_S):
            for name, watched in self._actors.items():
                self._check(name, watched)

    def _check(self, name: str, watched: _WatchedActor) -> None:
        watched.num_checks += 1
        try:
            answered, _ = ray.wait([watched.ping], timeout=0)
            if answered:
                watched.is_up = _is_up(watched.ping)
            elif not watched.is_up or watched.num_checks <= self._max_checks:
                return
            else:
                logger.error("%s has not answered for %d checks and is restarted", name, self._max_checks)
                ray.kill(watched.actor, no_restart=False)
                watched.is_up = False
            watched.ping, watched.num_checks = watched.actor.failure.remote(), 0
        except (RayError, ValueError):  # Ray itself fails, which cannot be handled here
            logger.debug("%s cannot be watched now", name, exc_info=True)


def _is_up(ping: Any) -> bool:
    try:
        ray.get(ping)
    except RayActorError:
        return False  # it has ended, and Ray restarts it
    return True
