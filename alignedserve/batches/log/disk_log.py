"""Result logs as files: one writer, any number of readers.

The writer holds a lock on the file that the system frees when the process ends, however it ends: there are never two.
Opening repairs: an end that does not verify is what a dead writer was writing, and is cut off; a damaged record in the
middle (a bad disk) is left out of a rewritten file, and its line runs again.
"""

import fcntl
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from alignedserve.batches.log.log_format import VERSION, LineEnd, LogTotals, ResultRecord, decoded, encoded, head
from alignedserve.batches.log.log_reader import LogSide, Marks, side_of_log
from alignedserve.batches.records import BatchKey, ResultKind, parsed_batch_key
from alignedserve.batches.stores.disk import disk_errors, sync_folder, write_all
from alignedserve.core.errors import StorageDamaged, StorageError

_SUFFIX = ".log"


@dataclass(slots=True)
class Recovered:
    """What a log held when it was opened."""

    settled: list[int] = field(default_factory=list)  # lines with a terminal record
    num_tries: Counter[int] = field(default_factory=Counter)  # by line, that came to nothing
    totals: LogTotals = field(default_factory=LogTotals)
    num_dropped: int = 0  # records that did not verify


class DiskLogs:
    """The result logs of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._marks = Marks()
        with disk_errors("result logs"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self, batch_id: BatchKey, num_lines: int) -> "tuple[DiskLog, Recovered]":
        """Become the one writer of this batch's log, making it where there is none. Raises StorageError where another
        process is its writer, StorageFull."""
        with disk_errors("a result log"):
            return _open(self._path(batch_id), batch_id, num_lines)

    def lines(self, batch_id: BatchKey, kind: ResultKind, log_bytes: int, start: int = 0) -> Iterator[bytes]:
        """One side of the log's first `log_bytes`, in the order in which lines ended, from its byte `start` on. Raises
        StorageDamaged at what does not verify, after everything before it. Every chunk is a read: use a thread."""
        with disk_errors("a result log"):
            try:
                file = self._path(batch_id).open("rb")
            except FileNotFoundError:
                return
            with file:
                side = LogSide(batch_id, kind, os.fstat(file.fileno()).st_ino)
                yield from side_of_log(file, side, self._marks, start=start, log_bytes=log_bytes)

    def remove(self, batch_id: BatchKey) -> None:
        """Forget a batch's results; may be repeated."""
        with disk_errors("a result log"):
            self._path(batch_id).unlink(missing_ok=True)

    def _path(self, batch_id: BatchKey) -> Path:
        assert parsed_batch_key(batch_id) is not None, "a path from something that is no id"
        return self._folder / f"{batch_id}{_SUFFIX}"


class DiskLog:
    """The writer's end. Calls block for a disk write: use it from a thread. One call at a time."""

    def __init__(self, file_descriptor: int, num_bytes: int) -> None:
        self._file: int | None = file_descriptor
        self._lock = threading.Lock()
        self.num_bytes = num_bytes  # durable

    def append(self, records: Sequence[ResultRecord]) -> None:
        """Add records, durable when this returns. Raises StorageError, StorageFull: then none of them is there."""
        content = b"".join(encoded(record) for record in records)
        with self._lock, disk_errors("results"):
            if self._file is None:
                raise StorageError("the result log is closed")
            try:
                write_all(self._file, content)
                os.fdatasync(self._file)
            except OSError:
                os.ftruncate(self._file, self.num_bytes)
                os.lseek(self._file, self.num_bytes, os.SEEK_SET)
                raise
            self.num_bytes += len(content)

    def close(self) -> None:
        """Give up the lock, once nothing is being written. May be repeated."""
        with self._lock:
            file_descriptor, self._file = self._file, None
            if file_descriptor is not None:
                os.close(file_descriptor)


def _open(path: Path, batch_id: BatchKey, num_lines: int) -> tuple[DiskLog, Recovered]:
    file_descriptor = _locked(path)
    try:
        recovered, end = _recover(path, batch_id, num_lines)
        if recovered.num_dropped:
            old, file_descriptor = file_descriptor, _rewritten(path, batch_id, num_lines)
            os.close(old)
            end = os.fstat(file_descriptor).st_size
        os.ftruncate(file_descriptor, end)
        os.lseek(file_descriptor, end, os.SEEK_SET)
        log = DiskLog(file_descriptor, end)
        if end == 0:
            log.append([head(batch_id, num_lines)])
            sync_folder(path.parent)
    except BaseException:
        os.close(file_descriptor)
        raise
    return log, recovered


def _locked(path: Path) -> int:
    file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file_descriptor)
        raise StorageError(f"another process writes {path.name}") from None
    return file_descriptor


def _recover(path: Path, batch_id: BatchKey, num_lines: int) -> tuple[Recovered, int]:
    """What the log holds, and where what verifies ends."""
    recovered, offset, num_bad, end = Recovered(), 0, 0, 0
    is_settled = bytearray(num_lines)
    with path.open("rb") as file:
        for raw in file:
            offset += len(raw)
            record = decoded(raw)
            if record is None or not _belongs(record, batch_id, is_settled):
                num_bad += 1
                continue
            recovered.num_dropped, num_bad, end = recovered.num_dropped + num_bad, 0, offset
            if record.end is LineEnd.BROKE:
                recovered.num_tries[record.line] += 1
            elif record.end.is_terminal:
                is_settled[record.line] = 1
                recovered.settled.append(record.line)
                recovered.totals.add(record)
    return recovered, end


def _belongs(record: ResultRecord, batch_id: BatchKey, is_settled: bytearray) -> bool:
    """Whether this is of a line of the batch that is not done, or its head. Raises StorageDamaged for another's log."""
    if record.end is LineEnd.HEAD:
        known = orjson.loads(record.payload)
        if known["batch_id"] != batch_id or known["version"] != VERSION:
            raise StorageDamaged(f"the result log of {batch_id} is of another batch or version")
        return True
    return 0 <= record.line < len(is_settled) and not is_settled[record.line]


def _rewritten(path: Path, batch_id: BatchKey, num_lines: int) -> int:
    """Put a copy without what does not verify in the log's place; returns it, locked."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    file_descriptor = _locked(partial)
    try:
        write_all(file_descriptor, encoded(head(batch_id, num_lines)))
        is_settled = bytearray(num_lines)
        with path.open("rb") as file:
            for record in map(decoded, file):
                if record is None or record.end is LineEnd.HEAD or not _belongs(record, batch_id, is_settled):
                    continue
                is_settled[record.line] = record.end.is_terminal
                write_all(file_descriptor, encoded(record))
        os.fsync(file_descriptor)
        partial.rename(path)
        sync_folder(path.parent)
    except BaseException:
        os.close(file_descriptor)
        partial.unlink(missing_ok=True)
        raise
    return file_descriptor
