"""Calls on files without a name, and on the memory of files, that not every system has."""

import os
import tempfile


def unnamed_file(purpose: str) -> int:
    """Return the descriptor of a new, empty file in memory, which its processes alone can reach and the caller closes.
    Where the system has no such files (macOS), of a temporary one that is removed at once."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(purpose, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def take_space(descriptor: int, offset: int, size: int) -> None:
    """Take the space of a part of a file, so that no later write to it can fail. Raises OSError where there is none.
    Where the system cannot say so ahead (macOS), the file is only made long enough."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, size)
    elif os.fstat(descriptor).st_size < offset + size:
        os.ftruncate(descriptor, offset + size)
