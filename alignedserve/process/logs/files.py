"""The logs of a cluster's processes on one host: written, and read in parts by those who look while they grow."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from alignedserve.process.logs.format import TEXT, formatter

_FOLDER = "logs"  # in the run folder of a cluster
_MAX_READ_BYTES = 1 << 20


class LossyFileHandler(logging.FileHandler):
    """Loses what the disk cannot take: Python would write a traceback to the terminal for each line."""

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing: metrics tell how full the disk is."""

    @override
    def close(self) -> None:
        """Write no more, and lose what cannot be written any more either."""
        with suppress(OSError):
            super().close()


class LogFileHandler(LossyFileHandler):
    """Writes the log of a process."""

    def __init__(self, path: Path, log_format: str = TEXT) -> None:
        """`log_format`: see log_format."""
        super().__init__(path)
        self.setFormatter(formatter(log_format, path.stem))


class LogPart(NamedTuple):
    """A part of a log, and where the next one begins."""

    text: str
    offset: int


def log_names(run_folder: Path) -> list[str]:
    """Return the processes that have a log in this run folder."""
    return sorted(path.stem for path in (run_folder / _FOLDER).glob("*.log"))


def read_log(run_folder: Path, name: str, offset: int) -> LogPart | None:
    """Return what a process wrote from this byte on (from the end, where it is negative); None: it has no log."""
    if name not in log_names(run_folder):
        return None
    with open(run_folder / _FOLDER / f"{name}.log", "rb") as log:
        size = os.fstat(log.fileno()).st_size
        begin = max(size + offset, 0) if offset < 0 else min(offset, size)
        log.seek(begin)
        text = log.read(_MAX_READ_BYTES)
    return LogPart(text.decode(errors="replace"), begin + len(text))
