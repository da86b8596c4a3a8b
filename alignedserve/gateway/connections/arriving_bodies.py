"""Counts the bodies that still arrive of each key: one that sends many slowly leaves connections to others."""

from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from starlette.types import Message, Receive

from alignedserve.api.errors import QuotaExceeded

_SHARE = 1 / 4  # of a gateway's connections, for the bodies of one key
_RETRY_S = 1.0


class ArrivingBodies:
    """The bodies that have not come to their end, by the owner of their key."""

    def __init__(self, max_connections: int) -> None:
        self.most = max(int(_SHARE * max_connections), 1)
        self._num = Counter[str]()

    def begin(self, owner: str) -> None:
        """Count one more. Raises QuotaExceeded."""
        if self._num[owner] >= self.most:
            message = f"Too many bodies of this key arrive at a time: Limit {self.most}."
            raise QuotaExceeded(message, retry_after_s=_RETRY_S)
        self._num[owner] += 1

    def end(self, owner: str) -> None:
        """Count one less."""
        self._num[owner] -= 1
        if not self._num[owner]:
            del self._num[owner]


class CountedBody:
    """The body of one request, which counts from when it is first awaited until it is whole, or `close`."""

    def __init__(self, bodies: ArrivingBodies, owner: str, receive: Receive, state: MutableMapping[str, Any]) -> None:
        """`state`: of its request, which gets `closes_connection` where it is refused."""
        self._state = state
        self._bodies = bodies
        self._owner = owner
        self._receive = receive
        self._has_begun = False
        self._counts = False

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

    def close(self) -> None:
        """Count it no more. May be repeated."""
        if self._counts:
            self._counts = False
            self._bodies.end(self._owner)
