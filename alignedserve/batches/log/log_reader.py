"""A result file as a view of the log: readable from any byte on, with a sparse index of what was read before."""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from alignedserve.batches.log.log_format import decode_record
from alignedserve.batches.records import BatchKey, ResultKind
from alignedserve.core.errors import StorageDamaged

_CHUNK_BYTES = 1024 * 1024
_INDEX_INTERVAL_BYTES = 1024 * 1024  # of the log, between two entries
_MAX_LOGS = 64  # whose entries are kept


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
        """Add an entry, unless there is one near it."""
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
