"""Limits of connections: what each may send, how many there may be, how many bodies of a key may arrive at a time.

A connection has the class of its last request, and none before the first was read. Best effort has three quarters of
the places at most, in all and of one address: waiting documents leave room for chat. A best-effort request without a
place is refused and its connection closed, so it holds a place of others only while it is read, for a time that
`header_timeout_s` and `min_body_bytes_per_s` bound.
"""

import resource
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from alignedserve.api.errors import QuotaExceeded
from alignedserve.config.sections import GatewayConfig

# As Starlette has them, which the driver of a cluster does not load.
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

_RESERVED_FILES = 256  # for links to the cluster, stores and logs
_KEPT_SHARE = 1 / 4  # of the places, from best effort
_SHARE_OF_KEY = 1 / 4  # of a gateway's connections, for the bodies of one key
_MOST_WHOLE = 64  # of the largest bodies, whose bytes those of one key may hold in memory
_RETRY_S = 1.0


@dataclass(slots=True)
class _Counts:
    num_open: int = 0
    num_best_effort: int = 0


@dataclass(slots=True)
class ConnectionLimits:
    """The limits of a gateway's connections, and the connections that count."""

    max_header_bytes: int
    header_timeout_s: float
    min_body_bytes_per_s: int
    max_connections: int
    max_per_address: int
    all: _Counts = field(default_factory=_Counts)
    of_address: dict[str, _Counts] = field(default_factory=dict)

    @classmethod
    def of(cls, config: GatewayConfig) -> "ConnectionLimits":
        """Return the configured limits; there are never more connections than the process may have files."""
        return cls(
            max_header_bytes=config.max_header_bytes,
            header_timeout_s=config.header_timeout_s,
            min_body_bytes_per_s=config.min_body_bytes_per_s,
            max_connections=min(config.max_connections, most_connections()),
            max_per_address=config.max_connections_per_address,
        )

    def admit(self, address: str) -> "ConnectionPlace | None":
        """Count one more connection of this address; None: there are too many, and it is to be closed."""
        of_address = self.of_address.get(address) or _Counts()
        if self.all.num_open >= self.max_connections or of_address.num_open >= self.max_per_address:
            return None
        self.of_address[address] = of_address
        for counts in (self.all, of_address):
            counts.num_open += 1
        return ConnectionPlace(self, address)

    def leave(self, address: str) -> None:
        of_address = self.of_address[address]
        for counts in (self.all, of_address):
            counts.num_open -= 1
        if not of_address.num_open:
            del self.of_address[address]

    def has_room_for_best_effort(self, address: str) -> bool:
        """Return whether one more connection of this address may be of best effort."""
        most, most_of_address = (_best_effort_of(limit) for limit in (self.max_connections, self.max_per_address))
        of_address = self.of_address[address]
        return self.all.num_best_effort < most and of_address.num_best_effort < most_of_address

    def add_best_effort(self, address: str, count: int) -> None:
        for counts in (self.all, self.of_address[address]):
            counts.num_best_effort += count


class ConnectionPlace:
    """The place of one connection, of the class of its last request."""

    def __init__(self, limits: ConnectionLimits, address: str) -> None:
        self._limits, self._address = limits, address
        self._is_best_effort = False

    def take_best_effort(self) -> bool:
        """Hold a place of best effort from now on; False: there is none."""
        if not self._is_best_effort and self._limits.has_room_for_best_effort(self._address):
            self._is_best_effort = True
            self._limits.add_best_effort(self._address, 1)
        return self._is_best_effort

    def take_real_time(self) -> None:
        if self._is_best_effort:
            self._is_best_effort = False
            self._limits.add_best_effort(self._address, -1)

    def leave(self) -> None:
        self.take_real_time()
        self._limits.leave(self._address)


def _best_effort_of(limit: int) -> int:
    return max(int((1.0 - _KEPT_SHARE) * limit), 1)


def most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _connections_within(soft)


def file_shortage(config: GatewayConfig) -> str | None:
    """Return a warning where a gateway may not open as many files as it may have connections; None: it may.

    It raises its own limit to what the system allows (the hard limit), which is looked at.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _connections_within(hard)
    if most >= config.max_connections:
        return None
    return (
        f"a gateway may open {hard} files here, enough for {most} connections where gateway.max_connections is "
        f"{config.max_connections}: raise the hard limit (ulimit -Hn, LimitNOFILE of systemd), or set it to {most}"
    )


def _connections_within(num_files: int) -> int:
    return 1 << 20 if num_files == resource.RLIM_INFINITY else max(16, num_files - min(_RESERVED_FILES, num_files // 2))


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class ArrivingBodies:
    """The bodies that have not come to their end, by the owner of their key."""

    def __init__(self, max_connections: int, max_body_bytes: int) -> None:
        self.most = max(int(_SHARE_OF_KEY * max_connections), 1)
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

    def __init__(self, bodies: ArrivingBodies, owner: str, receive: Receive) -> None:
        self._bodies = bodies
        self._owner = owner
        self._receive = receive
        self._has_begun = False
        self._counts = False
        self._num_bytes = 0  # in memory
        self.is_refused = False  # then the connection ends

    async def receive(self) -> Message:
        """Return the next message. Raises QuotaExceeded before the first one."""
        if not self._has_begun:
            self.is_refused = True
            self._bodies.begin(self._owner)
            self.is_refused, self._has_begun, self._counts = False, True, True
        message = await self._receive()
        if not message.get("more_body", False):
            self.close()
        return message

    def hold(self, num_bytes: int) -> None:
        if self._counts:
            self.is_refused = True
            self._bodies.hold(self._owner, num_bytes)
            self.is_refused = False
            self._num_bytes += num_bytes

    def close(self) -> None:
        if self._counts:
            self._counts = False
            self._bodies.end(self._owner, self._num_bytes)
