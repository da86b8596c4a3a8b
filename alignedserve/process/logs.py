"""The logs of a cluster's processes on one host: written, and read in parts by those who look while they grow."""

import json
import logging
import os
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from alignedserve.core.errors import ConfigError

current_request: ContextVar[str] = ContextVar("current_request", default="")


@contextmanager
def about_request(request_id: str) -> Iterator[None]:
    token = current_request.set(request_id)
    try:
        yield
    finally:
        current_request.reset(token)


TEXT, JSON = "text", "json"
FIELDS = "fields"  # attribute of a record: names and values beside the message, for lines of JSON


class TextFormatter(logging.Formatter):
    """Time, level, logger, message, and the request that the process was at."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        line, request_id = super().formatMessage(record), current_request.get()
        return f"{line} [{request_id}]" if request_id and request_id not in line else line


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, process, logger, message; request_id and error where there are such."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request.get():
            line["request_id"] = request_id
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


_FORMATTERS: dict[str, Callable[[str], logging.Formatter]] = {
    TEXT: lambda process: TextFormatter(),
    JSON: JsonFormatter,
}


def require_format(name: str) -> str:
    """Return the name of a format. Raises ConfigError for others."""
    if name not in _FORMATTERS:
        raise ConfigError(f"the format of logs must be {' or '.join(_FORMATTERS)}, not {name[:40]!r}")
    return name


def formatter(name: str, process: str) -> logging.Formatter:
    return _FORMATTERS[require_format(name)](process)


_FOLDER = "logs"  # in the run folder of a cluster
_MAX_READ_BYTES = 1 << 20


class LossyFileHandler(logging.FileHandler):
    """Loses what the disk cannot take: Python would write a traceback to the terminal for each line."""

    @override
    def handleError(self, record: logging.LogRecord) -> None: ...

    @override
    def close(self) -> None:
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


_MAX_LINES = 10_000  # that wait to be written
_FLUSH_S = 1.0

logger = logging.getLogger(__name__)


class QueuedLogHandler(QueueHandler):
    """Writes the log of a process, as LogFileHandler does, on a thread. A line is formatted by the logging thread,
    which knows the request. Those for which there is no room are lost until half of the room is free again; then a line
    says how many."""

    def __init__(self, path: Path, log_format: str = TEXT, max_lines: int = _MAX_LINES) -> None:
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(max_lines)
        super().__init__(self._lines)
        self.setFormatter(formatter(log_format, path.stem))
        self._num_lost = 0
        self._is_closed = False
        self._file = _LineFile(path)
        self._writer = QueueListener(self._lines, self._file)
        self._writer.start()

    @override
    def enqueue(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() <= self._lines.maxsize // 2:
            self._tell_loss()
        if self._num_lost or self._lines.full():
            self._num_lost += 1
        else:
            self._lines.put_nowait(record)

    def _tell_loss(self) -> None:
        if self._num_lost:
            message, arguments = "%d lines are lost here, as the log could not be written", (self._num_lost,)
            record = logger.makeRecord(logger.name, logging.WARNING, __file__, 0, message, arguments, None)
            self._lines.put_nowait(self.prepare(record))
            self._num_lost = 0

    @override
    def flush(self) -> None:
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(self._is_written, _FLUSH_S)

    def _is_written(self) -> bool:
        return self._lines.unfinished_tasks == 0

    @override
    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if not self._lines.full():
                self._tell_loss()
            self.flush()
            if self._is_written():  # else the thread ends with the process
                self._writer.stop()
                self._file.close_file()
        super().close()


class _LineFile(logging.Handler):
    """Writes finished lines. It has no lock, and what `logging` does at the end of a process does not touch the file:
    else that would hang where the file does."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (for as long as the process logs)

    @override
    def createLock(self) -> None:
        self.lock = None

    @override
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._file.write(record.getMessage().encode(errors="backslashreplace") + b"\n")

    def close_file(self) -> None:
        self._file.close()
