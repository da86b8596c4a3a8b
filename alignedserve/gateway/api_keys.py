"""Authentication: API keys, and the number of requests per minute that each may make."""

import hashlib
import hmac
from collections.abc import Callable, Sequence

from alignedserve.gateway.errors import QuotaExceeded, Unauthorized

PUBLIC_PATHS = frozenset({"/", "/health", "/ready", "/version"})
_SCHEME = "bearer "


class ApiKeys:
    """Checks keys in constant time and limits requests per key. Without keys all clients are one."""

    def __init__(
        self, keys: Sequence[str], *, requests_per_minute: int | None = None, clock: Callable[[], float]
    ) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)
        self._per_minute = requests_per_minute
        self._clock = clock
        # A token bucket per key: requests left, and when that was counted.
        self._buckets: dict[int, tuple[float, float]] = {}

    def authenticate(self, path: str, authorization: str | None) -> int:
        """Return the number of the client's key. Raises Unauthorized; only PUBLIC_PATHS need no key."""
        if not self._digests or path in PUBLIC_PATHS:
            return 0
        header = authorization or ""
        presented = _digest(header[len(_SCHEME) :].strip().encode())
        # Every key is compared, so that the time taken reveals nothing.
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if not header.lower().startswith(_SCHEME) or not any(matches):
            raise Unauthorized("A valid API key is required: send 'Authorization: Bearer KEY'.")
        return matches.index(True)

    def owner(self, key_number: int) -> str:
        """Return the owner's name for this key, independent of restarts and of other keys."""
        return hashlib.sha256(b"owner" + self._digests[key_number]).hexdigest()[:32] if self._digests else "anyone"

    def count_request(self, key_number: int) -> None:
        """Count one request. Raises QuotaExceeded with the time until the next one is allowed."""
        if self._per_minute is None:
            return
        now = self._clock()
        left, counted_s = self._buckets.get(key_number, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - counted_s) * self._per_minute / 60.0)
        if left < 1.0:
            self._buckets[key_number] = (left, now)
            wait_s = (1.0 - left) * 60.0 / self._per_minute
            raise QuotaExceeded(f"This key may make {self._per_minute} requests per minute.", retry_after_s=wait_s)
        self._buckets[key_number] = (left - 1.0, now)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
