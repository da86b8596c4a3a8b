"""Progress of loading a model, written by a worker to a small file and read by the process that waits for it."""

import contextlib
import fcntl
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

PROGRESS_SUFFIX = ".progress"
_RECORD = struct.Struct("<4Q")
_BETWEEN_S = 0.1  # writes


class LoadedShare(NamedTuple):
    """The part of a model that is loaded."""

    read_bytes: int = 0
    total_bytes: int = 0
    num_layers: int = 0  # read and packed
    total_layers: int = 0


class LoadingProgress:
    """Counts what one worker has read and packed. Without a path the counts go nowhere. Its file is locked until
    `finish` or the end of the process."""

    def __init__(self, path: Path | None, total_bytes: int, total_layers: int) -> None:
        self._file_descriptor = _open_locked(path) if path is not None else None
        self._done = LoadedShare(0, total_bytes, 0, total_layers)
        self._written_s = 0.0
        self._write()

    def tensor_read(self, num_bytes: int) -> None:
        done = self._done
        # Never beyond the whole, which is by the model's configuration: a form of weights may need more.
        self._done = done._replace(read_bytes=min(done.read_bytes + num_bytes, done.total_bytes))
        if time.monotonic() - self._written_s >= _BETWEEN_S:
            self._write()

    def layer_packed(self) -> None:
        self._done = self._done._replace(num_layers=self._done.num_layers + 1)

    def finish(self) -> None:
        done = self._done
        self._done = done._replace(read_bytes=done.total_bytes, num_layers=done.total_layers)
        self._write()
        if self._file_descriptor is not None:
            os.close(self._file_descriptor)
            self._file_descriptor = None

    def _write(self) -> None:
        self._written_s = time.monotonic()
        if self._file_descriptor is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the loading
                os.pwrite(self._file_descriptor, _RECORD.pack(*self._done), 0)


def _open_locked(path: Path) -> int | None:
    try:
        file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    with contextlib.suppress(BlockingIOError):  # a sweep looks at it just now
        fcntl.flock(file_descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file_descriptor


def remove_unused_progress(folder: Path) -> bool:
    """Remove the files of workers that do not load any more; return whether none is left."""
    is_empty = True
    for path in folder.glob(f"*{PROGRESS_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_empty = False
            else:
                path.unlink(missing_ok=True)
    return is_empty


def read_progress(path: Path) -> LoadedShare | None:
    """Return what a worker wrote; None: nothing yet."""
    try:
        return LoadedShare(*_RECORD.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None
