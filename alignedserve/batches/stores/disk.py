"""Disk access: locks, complete writes, and a full disk told apart from a broken one."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from alignedserve.core.errors import StorageError, StorageFull

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def disk_errors(subject: str) -> Iterator[None]:
    """Turn OSError into StorageFull or StorageError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(f"no space left on the disk for {subject}") from error
        raise StorageError(f"{subject} cannot be written or read: {error.strerror or error}") from error


def lock_file(path: Path) -> int | None:
    """Open and lock a file, created if missing; None: another process holds the lock. Closing the file frees the lock,
    and so does the end of the process, however it ends. Raises OSError."""
    file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file_descriptor)
        return None
    return file_descriptor


def write_all(file_descriptor: int, content: bytes) -> None:
    """Write every byte. Raises OSError."""
    rest = memoryview(content)
    while len(rest):
        rest = rest[os.write(file_descriptor, rest) :]


def sync_folder(folder: Path) -> None:
    """Make names in the folder durable. Raises OSError."""
    file_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)
