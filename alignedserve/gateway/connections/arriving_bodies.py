"""Counts the bodies of each key that still arrive: one that sends many slowly leaves connections and memory to all."""

from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from starlette.types import Message, Receive

from alignedserve.api.errors import QuotaExceeded

_SHARE = 1 / 4  # of a gateway's connections, for the bodies of one key
_MOST_WHOLE = 64  # of the largest bodies, whose bytes those of one key may hold in memory
_RETRY_S = 1.0


class ArrivingBodies:
    """The bodies that have not come to their end, by the owner of their key."""

    def __init__(self, max_connections: int, max_body_bytes: int) -> None:
        self.most = max(int(_SHARE * max_connections), 1)
        self.most_bytes = _MOST_WHOLE * max_body_bytes
        self._num = Counter[str]()
        self._num_bytes = Counter[str]()

    def begin(self, owner: str) -> None:
        if self._num[owner] >= self.most:
            message = f"Too many bodies of this key arrive at a time: Limit {self.most}."
            raise QuotaExceeded(message, retry_after_s=_RETRY_S)
        self._num[owner] += 1

    def hold(self, owner: str, num_bytes: int) -> None:
        """Count so many bytes more that stay in memory until the end of their body. Raises QuotaExceeded."""
        if self._num_bytes[owner] + num_bytes > self.most_bytes:
            message = f"Too many bytes of this key's bodies arrive at a time: Limit {self.most_bytes}."
            raise QuotaExceeded(message, retry_after_s=_RETRY_S)
        self._num_bytes[owner] += num_bytes

    def end(self, owner: str, num_bytes: int) -> None:
        for counts, num in ((self._num, 1), (self._num_bytes, num_bytes)):
            counts[owner] -= num
            if not counts[owner]:
                del counts[owner]


class CountedBody:
    """The body of one request, which counts from when it is first awaited until it is whole, or `close`."""

    def __init__(self, bodies: ArrivingBodies, owner: str, receive: Receive, state: MutableMapping[str, Any]) -> None:
        self._state = state
        self._bodies = bodies
        self._owner = owner
        self._receive = receive
        self._has_begun = False
        self._counts = False
        self._num_bytes = 0  # that it holds

    async def receive(self) -> Message:
        """Return the next message. Raises QuotaExceeded before the first one."""
        if not self._has_begun:
            self._state["closes_connection"] = True
            self._bodies.begin(self._owner)
            del self._state["closes_connection"]
            self._has_begun = self._counts = True
        message = await self._receive()
        if not message.get("more_body", False):
            self.close()
        return message

    def hold(self, num_bytes: int) -> None:
        if self._counts:
            self._state["closes_connection"] = True
            self._bodies.hold(self._owner, num_bytes)
            del self._state["closes_connection"]
            self._num_bytes += num_bytes

    def close(self) -> None:
        if self._counts:
            self._counts = False
            self._bodies.end(self._owner, self._num_bytes)
