"""Result lines written to a file or pipe: each exactly once, even if connections are lost in between.

Only whole lines are written, so the output always ends at the end of a line. Every download begins with the last line
that was written, to check that the server's file is still the same.
"""

import os
from pathlib import Path
from typing import BinaryIO, Protocol

from alignedserve.core.errors import AlignedServeError, ConfigError, PeerError

_BLOCK_BYTES = 64 * 1024


class ResultsChanged(PeerError):
    """The server's file does not continue where ours ends."""


class NotWritten(AlignedServeError):
    """The disk is full, or the reader of our output has closed it."""


class Sink(Protocol):
    """Destination of whole lines: a file, or a printer."""

    def write(self, whole_lines: bytes, /) -> int:
        """Write whole lines."""

    def flush(self) -> None:
        """Flush buffers."""

    def truncate(self) -> int:
        """Remove everything behind the current position."""


class ResultTail:
    """Lines written so far, continued by the next download."""

    def __init__(self, sink: Sink, *, num_bytes: int = 0, last_line: bytes = b"") -> None:
        self._sink = sink  # positioned behind the last whole line; with `last_line`, half a line may follow there
        self.num_bytes = num_bytes  # written, in whole lines
        self.num_lines = 0  # written by this object
        self._last_line = last_line
        self._rest = b""
        self._is_joined = not last_line

    def offset(self) -> int:
        return self.num_bytes - len(self._last_line)

    def begin(self) -> None:
        """Begin a download: half a line left by an earlier one will be sent again."""
        self._rest, self._is_joined = b"", not self._last_line

    def take(self, chunk: bytes) -> None:
        """Write the whole lines of a chunk. Raises ResultsChanged, NotWritten."""
        self._rest += chunk
        if not self._is_joined and not self._join():
            return
        end = self._rest.rfind(b"\n") + 1
        if not end:
            return
        whole, self._rest = self._rest[:end], self._rest[end:]
        try:
            self._sink.write(whole)
            self._sink.flush()
        except OSError as error:
            raise NotWritten(f"results cannot be written: {error.strerror}") from error
        self.num_bytes += end
        self.num_lines += whole.count(b"\n")
        self._last_line = whole[whole.rfind(b"\n", 0, end - 1) + 1 :]

    def _join(self) -> bool:
        known = self._last_line
        if not known.startswith(self._rest[: len(known)]):
            raise ResultsChanged("the results do not continue where those that are here end")
        if len(self._rest) < len(known):
            return False
        self._rest, self._is_joined = self._rest[len(known) :], True
        if not self.num_lines:
            self._sink.truncate()
        return True


def open_tail(path: Path) -> tuple[ResultTail, BinaryIO]:
    """Continue the output of an earlier run, or create the file. A file with other content is not touched. Raises
    ConfigError."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")
        end, last_line = _last_whole_line(file)
        is_foreign = not end and file.seek(0, os.SEEK_END) > 0
        file.seek(end)
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
    if is_foreign:
        file.close()
        raise ConfigError(f"--output {path}: holds something other than results")
    return ResultTail(file, num_bytes=end, last_line=last_line), file


def _last_whole_line(file: BinaryIO) -> tuple[int, bytes]:
    start, tail = file.seek(0, os.SEEK_END), b""
    while start:
        length = min(_BLOCK_BYTES, start)
        start -= length
        file.seek(start)
        tail = file.read(length) + tail
        end = tail.rfind(b"\n") + 1
        before = tail.rfind(b"\n", 0, max(0, end - 1))
        if end and (before >= 0 or start == 0):
            return start + end, tail[before + 1 : end]
    return 0, b""
