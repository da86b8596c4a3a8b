"""Decides when what drains is moved and ended: pure, by what the router and the gateways say is left.

A drain is of a whole node or of one worker. Its requests have time to finish; when that is over they are moved to other
workers, and a little later it ends, whatever is left. It ends as soon as nothing is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

MOVING_S = 5.0  # between the move of what is left and the end


@dataclass(frozen=True, slots=True)
class ProcessDrain:
    """The processes that drain together."""

    workers: tuple[str, ...]  # with the pool of a whole node
    gateways: tuple[str, ...]
    moves_s: float  # when what is left is moved
    is_given_back: bool = False  # the node, to Ray

    @property
    def ends_s(self) -> float:
        return self.moves_s + MOVING_S

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.workers, *self.gateways)


class Drains:
    """The drains that go on, by the name of their node or worker."""

    def __init__(self, going_on: Mapping[str, ProcessDrain] = MappingProxyType({}), seen_s: float = 0.0) -> None:
        self._going_on = dict(going_on)
        self._seen_s = seen_s  # when it was last asked what is over

    @property
    def going_on(self) -> Mapping[str, ProcessDrain]:
        return self._going_on

    @property
    def seen_s(self) -> float:
        return self._seen_s if self._going_on else 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._going_on

    def is_given_back(self, name: str) -> bool:
        return name in self._going_on and self._going_on[name].is_given_back

    def resume(self, now: float) -> None:
        """Go on in another process. Where `now` is less than before, its host, and so the clock, was started anew."""
        lost_s, self._seen_s = max(0.0, self._seen_s - now), now
        self._going_on = {
            name: replace(drain, moves_s=drain.moves_s - lost_s) for name, drain in self._going_on.items()
        }

    def begin(self, name: str, draining: ProcessDrain) -> None:
        self._going_on[name] = draining

    def end(self, name: str) -> None:
        """Forget a drain: it was undone, has ended, or its processes are gone. May be repeated."""
        self._going_on.pop(name, None)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(name for drain in self._going_on.values() for name in drain.workers)

    @property
    def gateways(self) -> tuple[str, ...]:
        return tuple(name for drain in self._going_on.values() for name in drain.gateways)

    def due_to_move(self, now: float) -> tuple[str, ...]:
        return tuple(name for drain in self._going_on.values() if now >= drain.moves_s for name in drain.workers)

    def finished(self, now: float, left: Mapping[str, int]) -> list[str]:
        """Return the drains that are over. `left`: the requests of each process that has answered since its drain."""
        self._seen_s = now
        return [
            name
            for name, drain in self._going_on.items()
            if now >= drain.ends_s or all(left.get(process) == 0 for process in drain.names)
        ]
