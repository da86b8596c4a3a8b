"""Errors of the disk in the words of storage: a full disk told apart from a broken one."""

import contextlib
import errno
from collections.abc import Iterator

from alignedserve.core.errors import StorageError, StorageFull

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def disk_errors(subject: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(f"no space left on the disk for {subject}") from error
        raise StorageError(f"{subject} cannot be written or read: {error.strerror or error}") from error
