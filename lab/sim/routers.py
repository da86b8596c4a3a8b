"""Simulated routers: their decisions take time, one may be lost, and a gateway chooses among several."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.messages.handshake import Role
from lab.sim.components import AnyLogic, Network, SimulatedComponent
from lab.sim.event_queue import EventQueue


class SimulatedRouter(SimulatedComponent):
    """Decides events one by one in the order of their arrival, each in `event_s`; 0: at once."""

    def __init__(
        self, name: str, logic: AnyLogic, event_queue: EventQueue, network: Network, *, event_s: float, begin_s: float
    ) -> None:
        self._event_s = event_s
        self._begin_s = begin_s
        self._work_s = 0.0  # that has come since then, whether done or not
        self._free_s = 0.0  # when it will have decided all that has come
        self._starts = 0  # events of an earlier start are ignored
        self.max_behind_s = 0.0  # longest time between the coming of an event and its decision
        super().__init__(name, Role.ROUTER, logic, event_queue, network)

    @property
    def busy_s(self) -> float:
        return self._work_s - self._counted_s(self._event_queue.now)

    @override
    def dispatch(self, event: Any) -> None:
        if self.is_lost:
            return
        if not self._event_s:
            super().dispatch(event)
            return
        now = self._event_queue.now
        begins_s = max(self._free_s, now)
        self._free_s = begins_s + self._event_s
        self._work_s += self._counted_s(begins_s)
        self.max_behind_s = max(self.max_behind_s, self._free_s - now)
        self._event_queue.at(self._free_s, self._decide, (self._starts, event))

    @override
    def lose(self) -> None:
        """End as a killed process does: what it knew and had to decide is gone."""
        self._work_s = self.busy_s
        self._free_s = self._event_queue.now
        super().lose()

    @override
    def restart(self, logic: AnyLogic) -> None:
        self._starts += 1
        super().restart(logic)

    def _counted_s(self, since_s: float) -> float:
        return max(self._free_s - max(since_s, self._begin_s), 0.0)

    def _decide(self, entry: tuple[int, Any]) -> None:
        start, event = entry
        if start == self._starts:
            super().dispatch(event)


@dataclass(slots=True)
class _Shard:
    name: str
    num_requests: int = 0  # by its latest status, about a second old
    is_lost: bool = False


class RouterChoice:
    """The router for a request: the less loaded of two that its id names (power of two choices).

    Loads are those of the routers' own reports, once a second, so that any number of gateways choose alike. A lost
    router gets no new request. Example: r7 names routers 1 and 3, which reported 120 and 90 requests: it goes to 3.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._shards = {name: _Shard(name) for name in names}

    def choose(self, request_id: RequestId) -> str:
        """Return a router's name; while all are lost, one of those."""
        shards = [shard for shard in self._shards.values() if not shard.is_lost] or list(self._shards.values())
        if len(shards) == 1:
            return shards[0].name
        named = request_id.encode()
        first = crc32(named) % len(shards)
        second = (first + 1 + crc32(named, 1) % (len(shards) - 1)) % len(shards)
        return min(shards[first], shards[second], key=lambda shard: shard.num_requests).name

    def observe(self, router: str, status: ClusterStatus) -> None:
        """Learn a router's load."""
        in_workers = status.num_prefilling + status.num_pooled + status.num_decoding
        self._shards[router].num_requests = status.num_queued + in_workers

    def set_lost(self, router: str, *, is_lost: bool) -> None:
        """Learn that a router is lost, or back."""
        self._shards[router].is_lost = is_lost
