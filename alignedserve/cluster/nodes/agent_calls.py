"""What the driver asks the agents of all nodes again and again. Never waits."""

import time
from collections.abc import Iterable, Mapping

from alignedserve.cluster.nodes.members import HostedModel, Member
from alignedserve.cluster.ray_node import OpenCalls
from alignedserve.process.loading_progress import LoadedShare
from alignedserve.runtime.lora.loaded_adapters import Changes, merged

_PERIOD_S = 0.5


class AdapterExchange:
    """The changes of all nodes, by deployment. It keeps nothing that the nodes do not have: the next driver hears all
    of it again."""

    def __init__(self) -> None:
        self._known: dict[str, Changes] = {}  # by deployment
        self._calls = OpenCalls()
        self._looked_s = float("-inf")

    def look(self, members: Iterable[Member], models: Mapping[str, HostedModel]) -> None:
        for answer in self._calls.answers().values():
            for deployment_id, changes in (answer or {}).items():
                if deployment_id in self._known:
                    self._known[deployment_id] = merged(self._known[deployment_id], changes)
        now = time.monotonic()
        able = [key for key, model in models.items() if model.served.lora.is_enabled and model.served.encoder is None]
        self._known = {key: self._known.get(key, {}) for key in able}
        if not able or now - self._looked_s < _PERIOD_S:
            return
        self._looked_s = now
        known = {key: tuple(changes.values()) for key, changes in self._known.items()}
        for member in members:
            if member.name not in self._calls:
                self._calls.ask(member.name, member.agent.actor.exchange_adapters.remote(known))


class LoadingOfNodes:
    """The progress of nodes, as they last said."""

    def __init__(self) -> None:
        self._calls = OpenCalls()
        self._known: dict[str, list[LoadedShare | None]] = {}

    def look(self, members: Iterable[Member]) -> list[LoadedShare | None]:
        self._known |= {name: shares for name, shares in self._calls.answers().items() if shares is not None}
        names = []
        for member in members:
            names.append(member.name)
            if member.name not in self._calls:
                self._calls.ask(member.name, member.agent.actor.progress.remote())
        return [share for name in names for share in self._known.get(name, ())]
