"""Asks the agents of all nodes, without waiting: how far models are loaded, and which adapters were."""

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.cluster.hosts.members import HostedModel, Member
from alignedserve.cluster.ray_polls import answers_so_far
from alignedserve.process.loading_progress import Progress
from alignedserve.runtime.lora.loaded_adapters import AdapterChange, Changes, merged

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5


class AdapterExchange:
    """The changes of all nodes, by deployment. Used on the driver's thread; never waits.

    It keeps nothing that the nodes do not have: the next driver hears all of it again.
    """

    def __init__(self) -> None:
        self._known: dict[str, Changes] = {}  # by deployment
        self._asked: dict[Any, Any] = {}  # agents by their calls
        self._looked_s = float("-inf")

    def look(self, members: Iterable[Member], models: Mapping[str, HostedModel]) -> None:
        for answer in answers_so_far(list(self._asked)).items():
            self._take(*answer)
        now = time.monotonic()
        able = [one for one, model in models.items() if model.served.lora.is_enabled and model.served.encoder is None]
        self._known = {one: self._known.get(one, {}) for one in able}
        if not able or now - self._looked_s < _PERIOD_S:
            return
        self._looked_s = now
        asked = set(self._asked.values())
        told = {one: tuple(changes.values()) for one, changes in self._known.items()}
        for member in members:
            agent = member.agent.actor
            if agent not in asked:
                self._asked[agent.exchange_adapters.remote(told)] = agent

    def _take(self, call: Any, answer: Mapping[str, tuple[AdapterChange, ...]] | None) -> None:
        del self._asked[call]
        for deployment_id, changes in (answer or {}).items():
            if deployment_id in self._known:
                self._known[deployment_id] = merged(self._known[deployment_id], changes)


class LoadingOfNodes:
    """The progress of nodes, as they last said."""

    def __init__(self) -> None:
        self._asked: dict[Any, str] = {}  # nodes by the calls of their agents
        self._known: dict[str, list[Progress | None]] = {}

    def look(self, members: Iterable[Member]) -> list[Progress | None]:
        answered = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0] if self._asked else []
        for reference in answered:
            name = self._asked.pop(reference)
            with contextlib.suppress(RayError):
                self._known[name] = ray.get(reference)
        names, asked = [], set(self._asked.values())
        for member in members:
            names.append(member.name)
            if member.name not in asked:
                self._asked[member.agent.actor.progress.remote()] = member.name
        return [one for name in names for one in self._known.get(name, ())]
