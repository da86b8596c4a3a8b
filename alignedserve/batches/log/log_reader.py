"""One side of a result log as the file that clients see: from any byte on, what lies before it read only once."""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from alignedserve.batches.log.log_format import decoded
from alignedserve.batches.records import BatchKey, ResultKind
from alignedserve.core.errors import StorageDamaged

_CHUNK_BYTES = 1024 * 1024
_MARK_BYTES = 1024 * 1024  # of the log, between two marks
_MAX_LOGS = 64  # whose marks are kept


class LogSide(NamedTuple):
    """One side of one log. A log that was repaired is another file."""

    batch_id: BatchKey
    kind: ResultKind
    inode: int


class _Mark(NamedTuple):
    side: int  # bytes of the side that lie before
    log: int  # where in the log its next record begins


class Marks:
    """Places from which logs were read before: who follows a batch's results asks for their end again and again.
    Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: OrderedDict[LogSide, list[_Mark]] = OrderedDict()

    def before(self, side: LogSide, start: int) -> _Mark:
        """The last place known at or before this byte of the side."""
        with self._lock:
            marks = self._marks.get(side, [])
            index = bisect_right(marks, start, key=lambda mark: mark.side)
            return marks[index - 1] if index else _Mark(0, 0)

    def note(self, side: LogSide, mark: _Mark) -> None:
        """Remember this place, unless one near it is known."""
        with self._lock:
            marks = self._marks.setdefault(side, [])
            self._marks.move_to_end(side)
            if mark.log >= (marks[-1].log if marks else 0) + _MARK_BYTES:
                marks.append(mark)
            while len(self._marks) > _MAX_LOGS:
                self._marks.popitem(last=False)


def side_of_log(file: BinaryIO, side: LogSide, marks: Marks, *, start: int, log_bytes: int) -> Iterator[bytes]:
    """The bytes of a side from `start` on, of the log's first `log_bytes`. Raises StorageDamaged at what does not
    verify, after everything before it."""
    mark = marks.before(side, start)
    file.seek(mark.log)
    place, offset = mark
    chunk: list[bytes] = []
    num_bytes, is_damaged, marked = 0, False, offset
    for raw in file:
        if offset + len(raw) > log_bytes:
            break
        record = decoded(raw)
        if record is None:
            is_damaged = True
            break
        offset += len(raw)
        if record.end.kind is side.kind:
            line = record.payload + b"\n"
            wanted = line[max(0, start - place) :]
            place += len(line)
            chunk.append(wanted)
            num_bytes += len(wanted)
        if offset >= marked + _MARK_BYTES:
            marks.note(side, _Mark(place, offset))
            marked = offset
        if num_bytes >= _CHUNK_BYTES:
            yield b"".join(chunk)
            chunk, num_bytes = [], 0
    if num_bytes:
        yield b"".join(chunk)
    if is_damaged:
        raise StorageDamaged(f"the results of {side.batch_id} cannot be read from byte {place} on")
