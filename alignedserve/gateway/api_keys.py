"""Authentication: API keys, by their digests."""

import hashlib
import hmac
from collections.abc import Sequence

from alignedserve.api.errors import Unauthorized

PUBLIC_PATHS = frozenset({"/", "/dashboard", "/health", "/ready", "/version"})


class ApiKeys:
    """Checks keys in constant time. Without keys all clients are one."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    @property
    def num_owners(self) -> int:
        """Return how many clients can be told apart: their numbers are below this."""
        return max(1, len(self._digests))

    def authenticate(self, path: str, presented_key: str | None) -> int:
        """Return the number of the client's key. Raises Unauthorized; only PUBLIC_PATHS need no key."""
        if not self._digests or path in PUBLIC_PATHS:
            return 0
        presented = _digest((presented_key or "").encode())
        # Every key is compared, so that the time taken reveals nothing.
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if presented_key is None or not any(matches):
            raise Unauthorized("A valid API key is required: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        return matches.index(True)

    def owner(self, key_number: int) -> str:
        """Return the owner's name for this key, independent of restarts and of other keys."""
        return hashlib.sha256(b"owner" + self._digests[key_number]).hexdigest()[:32] if self._digests else "anyone"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
