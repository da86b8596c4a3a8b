"""Tells whether files are others than when they were looked at last."""

from pathlib import Path
from typing import NamedTuple


class _Mark(NamedTuple):
    device: int
    inode: int
    num_bytes: int
    modified_ns: int


class LastSeen:
    """Files as they were last seen."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._marks: tuple[_Mark | None, ...] | None = None

    def has_changed(self) -> bool:
        """Look; return whether one is another than at the last look, has come or is gone. The first look finds so."""
        before, self._marks = self._marks, tuple(map(_mark_of, self._paths))
        return self._marks != before

    def forget(self) -> None:
        """Let the next look find a change, as the first one did. From any thread."""
        self._marks = None


def _mark_of(path: Path) -> _Mark | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return _Mark(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
