"""Format of the result log: one text line per terminal record and per failed attempt, each with its own checksum.

    <xxh3-64 of the rest, 16 hex digits> <line> <kind> <input tokens> <output tokens> <JSON of the result>

Where some input tokens came from the prefix cache, the field is `<input tokens>/<cached>`; where it is known how long
workers computed for the line, that of the output is `<output tokens>/<microseconds>` (from version 2 on).
The first record is the head, which names the batch and the version; another comes before what a newer version adds to
an older one's log. A log is only ever appended to; a partial record at its end, left by a writer that died, does not
verify and is cut off. The log alone decides which lines are done.
"""

import enum
from typing import NamedTuple

import orjson
import xxhash

from alignedserve.batches.records import BatchKey, Counts, ResultKind, Usage

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
