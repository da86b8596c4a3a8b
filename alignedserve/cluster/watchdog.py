"""Kills actors after a long silence; Ray restarts them. A stopped process would hold its requests."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from alignedserve.cluster.desired import Health, ProcessState
from alignedserve.cluster.ray_node import has_ended

logger = logging.getLogger(__name__)

_CHECK_S = 1.0
_LONGEST_S = 1e9  # more is for ever
_MAX_PROBLEM_LEN = 400  # characters: the record of a cluster has them, which every command reads


@dataclass(slots=True)
class _WatchedActor:
    actor: Any
    ping: Any = None  # the call without an answer
    num_checks: int = 0  # since that call
    health: Health = field(default_factory=Health)  # by its last answer

    @property
    def is_answering(self) -> bool:
        return self.health.state in (ProcessState.UP, ProcessState.FAILED)


class Watchdog:
    """Checks actors on a thread of its own. `start` once, `stop` once, before Ray is shut down."""

    def __init__(self, actors: Mapping[str, Any], hang_timeout_s: float) -> None:
        self._actors = {name: _WatchedActor(actor) for name, actor in actors.items()}
        # Checks, not seconds: time during which this process itself is stopped does not count.
        self._max_checks = max(1, round(min(hang_timeout_s, _LONGEST_S) / _CHECK_S))
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, name: str, actor: Any) -> None:
        self._actors = {**self._actors, name: _WatchedActor(actor)}  # a new one, as the thread reads the other

    def healths(self) -> dict[str, Health]:
        return {name: watched.health for name, watched in self._actors.items()}

    def forget(self, name: str) -> None:
        self._actors = {known: watched for known, watched in self._actors.items() if known != name}

    def stop(self) -> None:
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
            if watched.ping is not None and not self._has_answered(name, watched):
                return
            watched.ping, watched.num_checks = watched.actor.failure.remote(), 0
        except (RayError, ValueError):  # Ray itself fails, which cannot be handled here
            logger.debug("%s cannot be watched now", name, exc_info=True)

    def _has_answered(self, name: str, watched: _WatchedActor) -> bool:
        if has_ended(watched.ping):
            watched.health = _health_of(watched.ping)
            return True
        if not watched.is_answering or watched.num_checks <= self._max_checks:
            return False
        logger.error("%s has not answered for %d checks and is restarted", name, self._max_checks)
        ray.kill(watched.actor, no_restart=False)
        watched.health = Health(ProcessState.ENDED)
        return True


def _health_of(answered: Any) -> Health:
    try:
        failure = ray.get(answered)
    except ActorDiedError as error:  # an unexpected error of the start: Ray takes it for the end
        return Health(ProcessState.DEAD, _line_of(error.__cause__ or error))
    except RayError:
        return Health(ProcessState.ENDED)
    return Health(ProcessState.UP) if failure is None else Health(ProcessState.FAILED, _line_of(failure))


def _line_of(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip()[:_MAX_PROBLEM_LEN] if lines else type(error).__name__
