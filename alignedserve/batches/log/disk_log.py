"""Result logs as files: one writer, any number of readers.

The writer locks the file; the system frees the lock when the process ends, however it ends. Opening repairs the log: a
partial record at the end, left by a writer that died, is cut off; a damaged record in the middle (a bad disk) is left
out of a rewritten file, and its line runs again.

Format of the result log: one text line per terminal record and per failed attempt, each with its own checksum.

    <xxh3-64 of the rest, 16 hex digits> <line> <kind> <input tokens> <output tokens> <JSON of the result>

Where some input tokens came from the prefix cache, the field is `<input tokens>/<cached>`; where it is known how long
workers computed for the line, that of the output is `<output tokens>/<microseconds>` (from version 2 on).
The first record is the head, which names the batch and the version; another comes before what a newer version adds to
an older one's log. A log is only ever appended to; a partial record at its end, left by a writer that died, does not
verify and is cut off. The log alone decides which lines are done."""

import asyncio
import contextlib
import enum
import os
import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import orjson
import xxhash

from alignedserve.batches.records import BatchKey, Counts, ResultKind, Usage, parsed_batch_key
from alignedserve.batches.stores.disk_blobs import disk_errors
from alignedserve.core.errors import StorageDamaged, StorageError
from alignedserve.disk.durable import lock_file, publish, sync_folder, write_all

VERSION = 2
READABLE = (1, VERSION)
_HEAD_LINE = -1


class LineOutcome(enum.Enum):
    """Outcome of a line or attempt; the value is written to the log."""

    COMPLETED = "c"
    FAILED = "f"
    EXPIRED = "e"
    CANCELLED = "x"
    RETRY = "b"  # no outcome yet: the attempt failed and the line is retried
    HEAD = "h"  # no line: the first record

    @property
    def is_terminal(self) -> bool:
        return self not in (LineOutcome.RETRY, LineOutcome.HEAD)

    @property
    def kind(self) -> ResultKind | None:
        if not self.is_terminal:
            return None
        return ResultKind.OUTPUT if self is LineOutcome.COMPLETED else ResultKind.ERROR


class ResultRecord(NamedTuple):
    """The result of one line, or a failed attempt."""

    line: int  # from 0
    outcome: LineOutcome
    payload: bytes  # a line of the output or error file
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # of `input_tokens`
    compute_us: int = 0


_OUTCOMES = {outcome.value.encode(): outcome for outcome in LineOutcome}


def encode_record(record: ResultRecord) -> bytes:
    assert b"\n" not in record.payload, "a payload of two lines"
    rest = b"%d %b %d%b %d%b %b" % (
        record.line,
        record.outcome.value.encode(),
        record.input_tokens,
        b"/%d" % record.cached_tokens if record.cached_tokens else b"",
        record.output_tokens,
        b"/%d" % record.compute_us if record.compute_us else b"",
        record.payload,
    )
    return b"%016x %b\n" % (xxhash.xxh3_64_intdigest(rest), rest)


def decode_record(raw: bytes) -> ResultRecord | None:
    """Decode a whole line of the log; None if it does not verify."""
    if len(raw) < 18 or raw[16:17] != b" " or not raw.endswith(b"\n"):
        return None
    rest = raw[17:-1]
    if raw[:16] != b"%016x" % xxhash.xxh3_64_intdigest(rest):
        return None
    fields = rest.split(b" ", 4)
    if len(fields) != 5 or fields[1] not in _OUTCOMES:
        return None
    try:
        input_tokens, _, cached_tokens = fields[2].partition(b"/")
        output_tokens, _, compute_us = fields[3].partition(b"/")
        numbers = (fields[0], input_tokens, output_tokens, cached_tokens or b"0", compute_us or b"0")
        line, *used = map(int, numbers)
    except ValueError:
        return None
    return ResultRecord(line, _OUTCOMES[fields[1]], fields[4], *used)


def head_record(batch_id: BatchKey, num_lines: int) -> ResultRecord:
    payload = orjson.dumps({"version": VERSION, "batch_id": batch_id, "num_lines": num_lines})
    return ResultRecord(_HEAD_LINE, LineOutcome.HEAD, payload)


def version_of(head: ResultRecord) -> int:
    return int(orjson.loads(head.payload)["version"])


class LogTotals:
    """Sums over the records of a log."""

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(LineOutcome, 0)
        self.num_bytes = dict.fromkeys(ResultKind, 0)  # of the files, line ends included
        self.input_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.compute_us = 0

    def add(self, record: ResultRecord) -> None:
        kind = record.outcome.kind
        if kind is None:
            return
        self.outcomes[record.outcome] += 1
        self.num_bytes[kind] += len(record.payload) + 1
        self.input_tokens += record.input_tokens
        self.output_tokens += record.output_tokens
        self.cached_tokens += record.cached_tokens
        self.compute_us += record.compute_us

    def counts(self, total: int) -> Counts:
        return Counts(
            total=total,
            completed=self.outcomes[LineOutcome.COMPLETED],
            failed=self.outcomes[LineOutcome.FAILED],
            expired=self.outcomes[LineOutcome.EXPIRED],
            cancelled=self.outcomes[LineOutcome.CANCELLED],
        )

    def usage(self) -> Usage:
        return Usage(
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            compute_us=self.compute_us,
        )


_CHUNK_BYTES = 1024 * 1024
_INDEX_INTERVAL_BYTES = 1024 * 1024  # of the log, between two entries
_MAX_LOGS = 64  # whose entries are kept
_SUFFIX = ".log"


class LogView(NamedTuple):
    """One result file of one log. A repaired log is another file."""

    batch_id: BatchKey
    kind: ResultKind
    inode: int


class _IndexEntry(NamedTuple):
    view: int  # offset in the result file
    log: int  # offset in the log of the record that continues there


class OffsetIndex:
    """Sparse index from offsets in result files to offsets in logs: clients that follow a batch read its end again and
    again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[LogView, list[_IndexEntry]] = OrderedDict()

    def find(self, view: LogView, start: int) -> _IndexEntry:
        """Return the last entry at or before this byte of the result file."""
        with self._lock:
            entries = self._entries.get(view, [])
            index = bisect_right(entries, start, key=lambda entry: entry.view)
            return entries[index - 1] if index else _IndexEntry(0, 0)

    def add(self, view: LogView, entry: _IndexEntry) -> None:
        with self._lock:
            entries = self._entries.setdefault(view, [])
            self._entries.move_to_end(view)
            if entry.log >= (entries[-1].log if entries else 0) + _INDEX_INTERVAL_BYTES:
                entries.append(entry)
            while len(self._entries) > _MAX_LOGS:
                self._entries.popitem(last=False)


def read_view(file: BinaryIO, view: LogView, index: OffsetIndex, *, start: int, log_bytes: int) -> Iterator[bytes]:
    """Yield a result file from its byte `start` on, as the log's first `log_bytes` show it. Raises StorageDamaged at a
    damaged record, after everything before it."""
    view_offset, offset = index.find(view, start)
    file.seek(offset)
    chunk: list[bytes] = []
    num_bytes, is_damaged, indexed = 0, False, offset
    for raw in file:
        if offset + len(raw) > log_bytes:
            break
        record = decode_record(raw)
        if record is None:
            is_damaged = True
            break
        offset += len(raw)
        if record.outcome.kind is view.kind:
            line = record.payload + b"\n"
            wanted = line[max(0, start - view_offset) :]
            view_offset += len(line)
            chunk.append(wanted)
            num_bytes += len(wanted)
        if offset >= indexed + _INDEX_INTERVAL_BYTES:
            index.add(view, _IndexEntry(view_offset, offset))
            indexed = offset
        if num_bytes >= _CHUNK_BYTES:
            yield b"".join(chunk)
            chunk, num_bytes = [], 0
    if num_bytes:
        yield b"".join(chunk)
    if is_damaged:
        raise StorageDamaged(f"the results of {view.batch_id} cannot be read from byte {view_offset} on")


@dataclass(slots=True)
class RecoveredLog:
    """Content of a log when it was opened."""

    settled: list[int] = field(default_factory=list)  # lines with a terminal record
    num_attempts: Counter[int] = field(default_factory=Counter)  # failed ones, by line
    totals: LogTotals = field(default_factory=LogTotals)
    num_dropped: int = 0  # records that did not verify
    version: int = VERSION  # of its last head


class DiskLogs:
    """The result logs of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = OffsetIndex()
        with disk_errors("result logs"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self, batch_id: BatchKey, num_lines: int) -> "tuple[DiskLog, RecoveredLog]":
        """Open the log for writing and repair it; create a missing one. Raises StorageFull, or StorageError if another
        process is writing it."""
        with disk_errors("a result log"):
            return _open(self._path(batch_id), batch_id, num_lines)

    async def open_in_thread(self, batch_id: BatchKey, num_lines: int) -> "tuple[DiskLog, RecoveredLog]":
        opening = asyncio.ensure_future(asyncio.to_thread(self.open, batch_id, num_lines))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise

    def lines(self, batch_id: BatchKey, kind: ResultKind, log_bytes: int, start: int = 0) -> Iterator[bytes]:
        """Yield one result file, from its byte `start` on, as the log's first `log_bytes` show it. Raises
        StorageDamaged at a damaged record, after everything before it. Every chunk blocks for a read: use a thread."""
        with disk_errors("a result log"):
            try:
                file = self._path(batch_id).open("rb")
            except FileNotFoundError:
                return
            with file:
                view = LogView(batch_id, kind, os.fstat(file.fileno()).st_ino)
                yield from read_view(file, view, self._index, start=start, log_bytes=log_bytes)

    async def chunks(
        self, batch_id: BatchKey, kind: ResultKind, log_bytes: int, start: int = 0
    ) -> AsyncIterator[bytes]:
        """Each chunk is read in a thread: finding one may take a read of the whole log."""
        lines = self.lines(batch_id, kind, log_bytes, start)
        while chunk := await asyncio.to_thread(next, lines, b""):
            yield chunk

    async def remove(self, batch_id: BatchKey) -> None:
        with disk_errors("a result log"):
            self._path(batch_id).unlink(missing_ok=True)

    def _path(self, batch_id: BatchKey) -> Path:
        assert parsed_batch_key(batch_id) is not None, "a path from something that is no id"
        return self._folder / f"{batch_id}{_SUFFIX}"


class DiskLog:
    """A log that is open for writing. Calls block for a disk write: use a thread. One call at a time."""

    def __init__(self, file_descriptor: int, num_bytes: int) -> None:
        self._file: int | None = file_descriptor
        self._lock = threading.Lock()
        self.num_bytes = num_bytes  # durable
        self._has_rest = False  # behind them, of a write that failed

    def append(self, records: Sequence[ResultRecord]) -> None:
        """Append records, durable when this returns. Raises StorageError, StorageFull: then none was appended."""
        content = b"".join(encode_record(record) for record in records)
        with self._lock, disk_errors("results"):
            if self._file is None:
                raise StorageError("the result log is closed")
            if self._has_rest:
                self._cut(self._file)
            self._has_rest = True
            try:
                write_all(self._file, content)
                os.fdatasync(self._file)
            except OSError:
                self._cut(self._file)
                raise
            self._has_rest = False
            self.num_bytes += len(content)

    def _cut(self, file_descriptor: int) -> None:
        os.ftruncate(file_descriptor, self.num_bytes)
        os.lseek(file_descriptor, self.num_bytes, os.SEEK_SET)
        self._has_rest = False

    def close(self) -> None:
        with self._lock:
            file_descriptor, self._file = self._file, None
            if file_descriptor is not None:
                with contextlib.suppress(OSError):  # told of records that `append` has refused already
                    os.close(file_descriptor)


def _open(path: Path, batch_id: BatchKey, num_lines: int) -> tuple[DiskLog, RecoveredLog]:
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
        if end == 0 or recovered.version != VERSION:
            # Behind an older version's records as well: it would take ours for damaged, and drop them.
            log.append([head_record(batch_id, num_lines)])
            sync_folder(path.parent)
    except BaseException:
        os.close(file_descriptor)
        raise
    return log, recovered


def _close_opened(opening: "asyncio.Future[tuple[DiskLog, RecoveredLog]]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()


def _locked(path: Path) -> int:
    file_descriptor = lock_file(path)
    if file_descriptor is None:
        raise StorageError(f"another process writes {path.name}")
    return file_descriptor


def _recover(path: Path, batch_id: BatchKey, num_lines: int) -> tuple[RecoveredLog, int]:
    recovered, offset, num_bad, end = RecoveredLog(), 0, 0, 0
    is_settled = bytearray(num_lines)
    with path.open("rb") as file:
        for raw in file:
            offset += len(raw)
            record = decode_record(raw)
            if record is None or not _belongs(record, batch_id, is_settled):
                num_bad += 1
                continue
            recovered.num_dropped, num_bad, end = recovered.num_dropped + num_bad, 0, offset
            if record.outcome is LineOutcome.HEAD:
                recovered.version = version_of(record)
            elif record.outcome is LineOutcome.RETRY:
                recovered.num_attempts[record.line] += 1
            elif record.outcome.is_terminal:
                is_settled[record.line] = 1
                recovered.settled.append(record.line)
                recovered.totals.add(record)
    return recovered, end


def _belongs(record: ResultRecord, batch_id: BatchKey, is_settled: bytearray) -> bool:
    """Return True for the head, and for a record of a line that is not done. Raises StorageDamaged for the
    log of another batch or version."""
    if record.outcome is LineOutcome.HEAD:
        if orjson.loads(record.payload)["batch_id"] != batch_id:
            raise StorageDamaged(f"the result log of {batch_id} is of another batch")
        if version_of(record) not in READABLE:
            raise StorageDamaged(f"the result log of {batch_id} is of another version of AlignedServe")
        return True
    return 0 <= record.line < len(is_settled) and not is_settled[record.line]


def _rewritten(path: Path, batch_id: BatchKey, num_lines: int) -> int:
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    file_descriptor = _locked(partial)
    try:
        write_all(file_descriptor, encode_record(head_record(batch_id, num_lines)))
        is_settled = bytearray(num_lines)
        with path.open("rb") as file:
            for record in map(decode_record, file):
                if record is None or record.outcome is LineOutcome.HEAD or not _belongs(record, batch_id, is_settled):
                    continue
                is_settled[record.line] = record.outcome.is_terminal
                write_all(file_descriptor, encode_record(record))
        publish(file_descriptor, partial, path)
    except BaseException:
        os.close(file_descriptor)
        partial.unlink(missing_ok=True)
        raise
    return file_descriptor
