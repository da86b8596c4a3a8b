"""Authentication: whose key a request brings."""

import time
from collections.abc import Callable

from alignedserve.api.errors import Unauthorized
from alignedserve.keys.entry import ANYONE, KeyEntry
from alignedserve.keys.ring import CurrentKeys

PUBLIC_PATHS = frozenset({"/", "/dashboard", "/health", "/ready", "/version"})


class ApiKeys:
    """Checks keys against those of now. Without keys all clients are one."""

    def __init__(self, keys: CurrentKeys, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix time."""
        self._keys = keys
        self._clock = clock

    def authenticate(self, path: str, presented_key: str | None) -> KeyEntry:
        """Return the entry of the client's key. Raises Unauthorized; only PUBLIC_PATHS need no key."""
        if path in PUBLIC_PATHS:
            return ANYONE
        entry = self._keys.ring.find(presented_key, self._clock())
        if entry is None:
            raise Unauthorized("A valid API key is required: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        return entry
