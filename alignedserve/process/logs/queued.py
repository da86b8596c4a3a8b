"""A log that a thread of its own writes: what hangs there, a disk or a reader, holds up nothing else of its process."""

import logging
import queue
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path

from typing_extensions import override

from alignedserve.process.logs.format import TEXT, formatter

_MAX_LINES = 10_000  # that wait to be written
_FLUSH_S = 1.0

logger = logging.getLogger(__name__)


class QueuedLogHandler(QueueHandler):
    """Writes the log of a process, as LogFileHandler does, on a thread.

    A line is made where it is logged, as it names the request that is served there. Those for which there is no room
    are lost until half of the room is free again; then a line says how many.
    """

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
            told, arguments = "%d lines are lost here, as the log could not be written", (self._num_lost,)
            record = logger.makeRecord(logger.name, logging.WARNING, __file__, 0, told, arguments, None)
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
        """Write what is left, and no more; where that hangs it is lost. May be repeated."""
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
