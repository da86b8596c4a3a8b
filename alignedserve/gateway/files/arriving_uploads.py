"""Counts the bytes of uploads that still arrive: they are on the disk before they are files."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alignedserve.api.errors import QuotaExceeded


def too_many_files() -> QuotaExceeded:
    """Return the error of a key that has no room for another file."""
    return QuotaExceeded("This key has too many files; delete some.", retry_after_s=None)


class ArrivingUploads:
    """Counts the bytes of arriving uploads for each owner."""

    def __init__(self) -> None:
        self._num_bytes = Counter[str]()

    @contextmanager
    def counted(self, owner: str, room: int) -> Iterator[Callable[[int], None]]:
        num_bytes = 0

        def take(more: int) -> None:
            nonlocal num_bytes
            if self._num_bytes[owner] + more > room:
                raise too_many_files()
            self._num_bytes[owner] += more
            num_bytes += more

        try:
            yield take
        finally:
            self._num_bytes[owner] -= num_bytes
            if not self._num_bytes[owner]:
                del self._num_bytes[owner]
