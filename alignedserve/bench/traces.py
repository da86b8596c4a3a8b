"""Reading recorded traces: when requests came and how long they and their answers were.

Two public formats, plain or gzipped, told apart by their first line:

- Azure CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`; the time stamp is a date and time, or seconds.
- Mooncake JSONL: `{"timestamp": milliseconds, "input_length": ..., "output_length": ...}`; other fields are ignored.
"""

import gzip
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from alignedserve.core.errors import ConfigError

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
MAX_LENGTH = 10_000_000  # tokens; a larger number in a trace is a mistake
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request."""

    arrival_s: float  # since the first row
    prompt_len: int
    output_len: int


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int


def read_trace(path: Path) -> list[TraceRow]:
    """All rows, earliest first, the first at time 0. Raises ConfigError naming the line."""
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse_trace(lines, name=str(path))


def parse_trace(lines: Sequence[str], *, name: str) -> list[TraceRow]:
    """The same from lines; `name` stands in the error messages."""
    if lines and lines[0].replace(" ", "") == AZURE_HEADER:
        rows = _parse_lines(lines[1:], 2, _azure_row, name)
    elif lines and lines[0].startswith("{"):
        rows = _parse_lines(lines, 1, _mooncake_row, name)
    else:
        raise ConfigError(f"{name}:1: neither the header {AZURE_HEADER!r} nor a JSON object")
    if not rows:
        raise ConfigError(f"{name}: no requests in it")
    rows.sort(key=lambda row: row.arrival_s)
    return shifted(rows, rows[0].arrival_s)


def _parse_lines(
    lines: Iterable[str], first_number: int, parse: Callable[[str], TraceRow], name: str
) -> list[TraceRow]:
    rows = []
    for number, line in enumerate(lines, start=first_number):
        if not line.strip():
            continue
        try:
            row = parse(line)
        except (ValueError, msgspec.DecodeError) as error:
            raise ConfigError(f"{name}:{number}: {error}") from error
        if not (0 < row.prompt_len <= MAX_LENGTH and 0 <= row.output_len <= MAX_LENGTH):
            raise ConfigError(f"{name}:{number}: lengths {row.prompt_len} and {row.output_len} are out of range")
        rows.append(row)
    return rows


def _azure_row(line: str) -> TraceRow:
    fields = line.split(",")
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields where 3 are expected")
    return TraceRow(_azure_seconds(fields[0]), int(fields[1]), int(fields[2]))


def _azure_seconds(text: str) -> float:
    """A date and time (seven decimals in the published file), or plain seconds."""
    try:
        seconds = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if seconds < 0 or seconds != seconds or seconds == float("inf"):
        raise ValueError(f"{text!r} is not a time")
    return seconds


def _mooncake_row(line: str) -> TraceRow:
    row = msgspec.json.decode(line, type=_MooncakeRow)
    return TraceRow(row.timestamp / 1000.0, row.input_length, row.output_length)


# --- cutting and scaling ----------------------------------------------------------------------------------------------


def shifted(rows: Iterable[TraceRow], origin_s: float) -> list[TraceRow]:
    """The rows with `origin_s` as the new time 0."""
    return [TraceRow(row.arrival_s - origin_s, row.prompt_len, row.output_len) for row in rows]


def window(rows: Sequence[TraceRow], start_s: float, duration_s: float | None) -> list[TraceRow]:
    """The rows of [start, start + duration), the window's start as time 0."""
    end_s = float("inf") if duration_s is None else start_s + duration_s
    chosen = [row for row in rows if start_s <= row.arrival_s < end_s]
    if not chosen:
        raise ConfigError(f"the trace has no request between {start_s:g} s and {end_s:g} s")
    return shifted(chosen, start_s)


def mean_rate(rows: Sequence[TraceRow]) -> float:
    """Requests per second between the first and the last arrival; 0 for fewer than two."""
    span_s = rows[-1].arrival_s - rows[0].arrival_s if rows else 0.0
    return (len(rows) - 1) / span_s if span_s > 0 else 0.0


def sped_up(rows: Iterable[TraceRow], factor: float) -> list[TraceRow]:
    """Arrivals `factor` times as fast, in the same pattern."""
    return [TraceRow(row.arrival_s / factor, row.prompt_len, row.output_len) for row in rows]
