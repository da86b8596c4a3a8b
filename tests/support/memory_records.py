"""Records in memory, for tests and for measuring a gateway alone. Lost when the process ends."""

import time
from collections.abc import Callable, Mapping, Sequence

from alignedserve.batches.interfaces import Page
from alignedserve.core.errors import StoreUnavailable
from alignedserve.messages.state import AddToIndex, Change, DeleteValue, RemoveFromIndex, SetValue

_MAX_NAME_LEN = 256  # of messages/state.py


class MemoryRecords:
    """Implements RecordStore. While `is_down`, every call fails as if the store did not answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[str, tuple[bytes, float]] = {}  # with its expiry time
        self._lists: dict[str, dict[str, float]] = {}
        self.is_down = False

    def keys_of(self, beginning: str) -> list[str]:
        """Return the keys that begin so."""
        return [key for key in self._values if key.startswith(beginning)]

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """See RecordStore."""
        self._check()
        return [self._value(key) for key in keys]

    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        """See RecordStore."""
        self._check()
        if any(self._value(key) != value for key, value in unchanged.items()):
            return False
        for change in changes:
            self._do(change)
        return True

    async def page(self, index: str, *, after: str | None, limit: int, newest_first: bool) -> Page | None:
        """See RecordStore."""
        self._check()
        assert after is None or len(after) <= _MAX_NAME_LEN, "no link would take such a message"
        scores = self._lists.get(index, {})
        ordered = sorted((score, member) for member, score in scores.items())
        if newest_first:
            ordered.reverse()
        first = 0
        if after is not None:
            if after not in scores:
                return None
            first = ordered.index((scores[after], after)) + 1
        members = ordered[first : first + limit]
        return Page(tuple(member for _, member in members), len(ordered) > first + limit)

    async def close(self) -> None:
        """See RecordStore."""

    def _check(self) -> None:
        if self.is_down:
            raise StoreUnavailable("The state of batches cannot be reached now.")

    def _value(self, key: str) -> bytes | None:
        value, until_s = self._values.get(key, (None, 0.0))
        return value if value is not None and self._clock() < until_s else None

    def _do(self, change: Change) -> None:
        match change:
            case SetValue(key, value, lifetime_s):
                self._values[key] = (value, float("inf") if lifetime_s is None else self._clock() + lifetime_s)
            case DeleteValue(key):
                self._values.pop(key, None)
            case AddToIndex(index, member, score):
                self._lists.setdefault(index, {})[member] = score
            case RemoveFromIndex(index, member):
                self._lists.get(index, {}).pop(member, None)
