"""The result log: one text line per terminal record, and per try that came to nothing, each with its own checksum.

    <xxh3-64 of the rest, 16 hex digits> <line> <kind> <input tokens> <output tokens> <JSON of the result>

The first record is the head, which names the batch. A log is only ever appended to; what was being written when its
writer died is an end that does not verify, and is cut off. It is the only truth about which lines are done.
"""

import enum
from typing import NamedTuple

import orjson
import xxhash

from alignedserve.batches.records import BatchKey, Counts, ResultKind, Usage

VERSION = 1
_HEAD_LINE = -1
MAX_RECORD_BYTES = 256 * 1024 * 1024


class LineEnd(enum.Enum):
    """How a line ended; the value stands in the log."""

    COMPLETED = "c"
    FAILED = "f"
    EXPIRED = "e"
    CANCELLED = "x"
    BROKE = "b"  # no end: it was taken, came to nothing, and is tried again
    HEAD = "h"  # no line: the first record

    @property
    def is_terminal(self) -> bool:
        """Whether the line is done with it."""
        return self not in (LineEnd.BROKE, LineEnd.HEAD)

    @property
    def kind(self) -> ResultKind | None:
        """In which file its record stands, if in any."""
        if not self.is_terminal:
            return None
        return ResultKind.OUTPUT if self is LineEnd.COMPLETED else ResultKind.ERROR


class ResultRecord(NamedTuple):
    """How one line ended, or a try of it."""

    line: int  # from 0
    end: LineEnd
    payload: bytes  # a line of the output or error file
    input_tokens: int = 0
    output_tokens: int = 0


_ENDS = {end.value.encode(): end for end in LineEnd}


def encoded(record: ResultRecord) -> bytes:
    """The record as a line of the log."""
    assert b"\n" not in record.payload, "a payload of two lines"
    rest = b"%d %b %d %d %b" % (
        record.line,
        record.end.value.encode(),
        record.input_tokens,
        record.output_tokens,
        record.payload,
    )
    return b"%016x %b\n" % (xxhash.xxh3_64_intdigest(rest), rest)


def decoded(raw: bytes) -> ResultRecord | None:
    """The record of a whole line of the log; None when it does not verify."""
    if len(raw) < 18 or raw[16:17] != b" " or not raw.endswith(b"\n"):
        return None
    rest = raw[17:-1]
    if raw[:16] != b"%016x" % xxhash.xxh3_64_intdigest(rest):
        return None
    fields = rest.split(b" ", 4)
    if len(fields) != 5 or fields[1] not in _ENDS:
        return None
    try:
        numbers = [int(fields[place]) for place in (0, 2, 3)]
    except ValueError:
        return None
    return ResultRecord(numbers[0], _ENDS[fields[1]], fields[4], numbers[1], numbers[2])


def head(batch_id: BatchKey, num_lines: int) -> ResultRecord:
    """The first record of a batch's log."""
    payload = orjson.dumps({"version": VERSION, "batch_id": batch_id, "num_lines": num_lines})
    return ResultRecord(_HEAD_LINE, LineEnd.HEAD, payload)


class LogTotals:
    """What a log's records add up to."""

    def __init__(self) -> None:
        self.ends = dict.fromkeys(LineEnd, 0)
        self.num_bytes = dict.fromkeys(ResultKind, 0)  # of the files, line ends included
        self.input_tokens = 0
        self.output_tokens = 0

    def add(self, record: ResultRecord) -> None:
        """One more record."""
        kind = record.end.kind
        if kind is None:
            return
        self.ends[record.end] += 1
        self.num_bytes[kind] += len(record.payload) + 1
        self.input_tokens += record.input_tokens
        self.output_tokens += record.output_tokens

    def counts(self, total: int) -> Counts:
        """Lines by how they ended."""
        return Counts(
            total=total,
            completed=self.ends[LineEnd.COMPLETED],
            failed=self.ends[LineEnd.FAILED],
            expired=self.ends[LineEnd.EXPIRED],
            cancelled=self.ends[LineEnd.CANCELLED],
        )

    def usage(self) -> Usage:
        """Tokens of lines that were answered."""
        return Usage(input_tokens=self.input_tokens, output_tokens=self.output_tokens)
