"""Address of a Redis, apart from its client: most clusters need none."""

from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 2.0  # a write is on the disk when it is answered


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """Address of a Redis, with its password if it has one: plain values that can be sent to every process."""

    url: str = field(repr=False)  # redis://, rediss:// (TLS) or unix://
    authority: str | None = None  # certificates that sign the server's, in PEM; None: the system's
    is_local: bool = False  # no other host reaches it

    def options(self) -> dict[str, Any]:
        """Return what a client is made with, beside the URL."""
        timeouts = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
        return timeouts if self.authority is None else {**timeouts, "ssl_ca_data": self.authority}
