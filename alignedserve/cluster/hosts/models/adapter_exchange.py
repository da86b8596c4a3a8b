"""Passes adapters that were loaded on one node to the others, through the keepers of the nodes."""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from alignedserve.cluster.hosts.members import Member
from alignedserve.cluster.hosts.models.hosted import HostedModel
from alignedserve.cluster.hosts.ray_calls import answers_so_far
from alignedserve.runtime.lora.loaded_file import AdapterChange, Changes, merged

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5


class AdapterExchange:
    """The changes of all nodes, by deployment. Used on the driver's thread; never waits.

    It keeps nothing that the nodes do not have: the next driver hears all of it again.
    """

    def __init__(self) -> None:
        self._known: dict[str, Changes] = {}  # by deployment
        self._asked: dict[Any, Any] = {}  # keepers by their calls
        self._looked_s = float("-inf")

    def look(self, members: Iterable[Member], models: Mapping[str, HostedModel]) -> None:
        """Take the answers that have come, and ask anew those that have answered."""
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
            keeper = member.keeper.actor
            if keeper not in asked:
                self._asked[keeper.exchange_adapters.remote(told)] = keeper

    def _take(self, call: Any, answer: Mapping[str, tuple[AdapterChange, ...]] | None) -> None:
        del self._asked[call]
        for deployment_id, changes in (answer or {}).items():
            if deployment_id in self._known:
                self._known[deployment_id] = merged(self._known[deployment_id], changes)
