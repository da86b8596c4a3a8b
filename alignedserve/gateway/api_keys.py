"""API keys: who may ask, and how often."""

import hashlib
import hmac
from collections.abc import Callable, Sequence

from alignedserve.gateway.errors import QuotaExceeded, Unauthorized

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version"})
_SCHEME = "bearer "


class ApiKeys:
    """Checks keys in constant time and counts requests per key. Without keys everybody is the same client."""

    def __init__(
        self, keys: Sequence[str], *, requests_per_minute: int | None = None, clock: Callable[[], float]
    ) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)
        self._per_minute = requests_per_minute
        self._clock = clock
        # Per key: requests that may still be made, and when that was true.
        self._left: dict[int, tuple[float, float]] = {}

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._digests

    def identify(self, path: str, authorization: str | None) -> int:
        """The number of the client's key. Raises Unauthorized; routes are closed unless listed as open."""
        if self.is_open or path in OPEN_PATHS:
            return 0
        header = authorization or ""
        presented = _digest(header[len(_SCHEME) :].strip().encode())
        # Every key is compared, so that the time tells nothing.
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if not header.lower().startswith(_SCHEME) or not any(matches):
            raise Unauthorized("A valid API key is required: send 'Authorization: Bearer KEY'.")
        return matches.index(True)

    def owner(self, key_number: int) -> str:
        """A name for whoever holds this key: the same after a restart, whatever other keys there are."""
        return "anyone" if self.is_open else hashlib.sha256(b"owner" + self._digests[key_number]).hexdigest()[:32]

    def spend(self, key_number: int) -> None:
        """Count one request. Raises QuotaExceeded with the time until the next one is allowed."""
        if self._per_minute is None:
            return
        now = self._clock()
        left, counted_s = self._left.get(key_number, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - counted_s) * self._per_minute / 60.0)
        if left < 1.0:
            self._left[key_number] = (left, now)
            wait_s = (1.0 - left) * 60.0 / self._per_minute
            raise QuotaExceeded(f"This key may make {self._per_minute} requests per minute.", retry_after_s=wait_s)
        self._left[key_number] = (left - 1.0, now)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
