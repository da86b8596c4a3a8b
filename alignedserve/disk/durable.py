"""Writes files that are whole after a power failure, and locks them. Everything raises OSError as the system does."""

import fcntl
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple


def write_durably(path: Path, content: bytes) -> None:
    """Make a file of mode 0600, or replace one: after a power failure either the old or the new one is there, whole."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        partial = Path(file.name)
        try:
            file.write(content)
            file.flush()
            publish(file.fileno(), partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def publish(file_descriptor: int, partial: Path, path: Path) -> None:
    """Give a complete file its name, replacing an earlier file of that name."""
    os.fsync(file_descriptor)
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names in the folder durable."""
    file_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)


def write_all(file_descriptor: int, content: bytes) -> None:
    """Write every byte."""
    rest = memoryview(content)
    while len(rest):
        rest = rest[os.write(file_descriptor, rest) :]


def lock_file(path: Path) -> int | None:
    """Open and lock a file, created if missing; None: another process holds the lock. Closing the file frees the lock,
    and so does the end of the process, however it ends."""
    file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file_descriptor)
        return None
    return file_descriptor


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
        status = path.stat()
    except OSError:
        return None
    return _Mark(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def open_private(path: str | Path, flags: int) -> int:
    """Open a file, of mode 0600 where it is made, and no link: an opener for `open`. Raises OSError."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
