"""Progress of loading a model, written by a worker to a small file and read by the process that waits for it."""

import contextlib
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

_RECORD = struct.Struct("<4Q")
_BETWEEN_S = 0.1  # writes


class Progress(NamedTuple):
    """The part of a model that is loaded."""

    read_bytes: int = 0
    total_bytes: int = 0
    num_layers: int = 0  # read and packed
    total_layers: int = 0


class LoadingProgress:
    """Counts what one worker has read and packed. Without a path the counts go nowhere."""

    def __init__(self, path: Path | None, total_bytes: int, total_layers: int) -> None:
        self._path = path
        self._done = Progress(0, total_bytes, 0, total_layers)
        self._written_s = 0.0
        self._write()

    def tensor_read(self, num_bytes: int) -> None:
        """Count a tensor."""
        done = self._done
        # Never beyond the whole, which is by the model's configuration: a form of weights may need more.
        self._done = done._replace(read_bytes=min(done.read_bytes + num_bytes, done.total_bytes))
        if time.monotonic() - self._written_s >= _BETWEEN_S:
            self._write()

    def layer_packed(self) -> None:
        """Count a layer."""
        self._done = self._done._replace(num_layers=self._done.num_layers + 1)

    def finish(self) -> None:
        """Note that all is loaded."""
        done = self._done
        self._done = done._replace(read_bytes=done.total_bytes, num_layers=done.total_layers)
        self._write()

    def _write(self) -> None:
        self._written_s = time.monotonic()
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # a full disk must not end the loading
            file_descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(file_descriptor, _RECORD.pack(*self._done), 0)
            finally:
                os.close(file_descriptor)


def read_progress(path: Path) -> Progress | None:
    """Return what a worker wrote; None: nothing yet."""
    try:
        return Progress(*_RECORD.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None
