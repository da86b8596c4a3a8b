"""The pace of a decode worker, told to its pool: by it requests with a deadline stop waiting in time."""

from collections.abc import Callable

from alignedserve.messages.caches import DecodePace
from alignedserve.messages.events import Send
from alignedserve.messages.handshake import Role
from alignedserve.scheduling.policy import IterationHistory

_LEAST_CHANGE = 0.1  # share of what was told last


class Pace:
    """Seconds that an iteration of the running batch takes: by the cost model, or without one a mean of the latest."""

    def __init__(self, pool_name: str, decode_s: Callable[[], float | None] | None) -> None:
        """`decode_s`: by the cost model; None: there is none. It gives None where nothing decodes."""
        self._pool_name = pool_name
        self._decode_s = decode_s
        self._history = IterationHistory()
        self._told_s: float | None = None  # None: the pool is not linked

    def connected(self, role: Role, peer: str) -> None:
        if role is Role.KV_POOL and peer == self._pool_name:
            self._told_s = 0.0

    def disconnected(self, peer: str) -> None:
        if peer == self._pool_name:
            self._told_s = None

    def note(self, duration_s: float) -> None:
        self._history.note(duration_s)

    def report(self) -> list[Send]:
        iteration_s = self.iteration_s()
        if self._told_s is None or abs(iteration_s - self._told_s) <= _LEAST_CHANGE * self._told_s:
            return []
        self._told_s = iteration_s
        return [Send(self._pool_name, DecodePace(iteration_s))]

    def iteration_s(self) -> float:
        """Return the time of an iteration of the running requests; if nothing runs, of the last ones."""
        predicted_s = self._decode_s() if self._decode_s is not None else None
        return self._history.mean_s if predicted_s is None else predicted_s
