"""Readers of recorded traces: arrival times and lengths of requests and answers.

Plain or gzipped, told apart by the names in their first line; columns may have any order:

- our own CSV: `arrival_s,prompt_len,output_len`, and any of `class` (rt or be), `ttft_s`, `tpot_s`, `deadline_s`,
  `priority` and `model` (that answered), where an empty field says nothing; earliest first;
- our own JSONL: the same names as fields of an object per line;
- Azure CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`; the time stamp is a date and time, or seconds;
- BurstGPT CSV: `Timestamp,Model,Request tokens,...`; failed requests (no tokens at all) are left out;
- Mooncake JSONL: `{"timestamp": milliseconds, "input_length": ..., "output_length": ..., "hash_ids": [...]}`; other
  fields are ignored.

`hash_ids`, which our JSONL may have too, name the blocks of 512 tokens that a prompt begins with (prompt_texts.py).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import MAX_PRIORITY, RequestClass, Slo
from lab.workload.prompt_texts import in_repetition, runs_of
from lab.workload.requests import TextRun
from lab.workload.text_lines import MAX_LENGTH, CsvColumns, columns_of, is_json, parsed_lines, read_lines

OWN_COLUMNS = ("arrival_s", "prompt_len", "output_len")
TERMS_COLUMNS = ("class", "ttft_s", "tpot_s", "deadline_s", "priority")
_OWN_KNOWN_COLUMNS = (*OWN_COLUMNS, *TERMS_COLUMNS, "model")
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
_MILLISECONDS_OF_1970 = 1e11  # from 1973 on; seconds come so far in the year 5138
_SHIPPED = Path(__file__).parent / "shipped" / "azure_conv_slice.csv"


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of service that a trace states for a request; None where it states nothing."""

    request_class: RequestClass | None = None
    slo: Slo | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request."""

    arrival_s: float  # since the first row
    prompt_len: int
    output_len: int
    terms: Terms | None = None
    model: str | None = None  # that answered; its tokenizer counted the lengths
    runs: tuple[TextRun, ...] = ()  # of texts that the prompt begins with

    def at(self, arrival_s: float) -> "TraceRow":
        """Return the same request at another moment."""
        return replace(self, arrival_s=arrival_s)

    def again(self, arrival_s: float, number: int) -> "TraceRow":
        """Return the request of a repetition of its trace, 0 for the trace itself."""
        return replace(self, arrival_s=arrival_s, runs=in_repetition(self.runs, number))


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class _OwnRow(msgspec.Struct, forbid_unknown_fields=True, rename={"request_class": "class"}):
    arrival_s: float
    prompt_len: int
    output_len: int
    request_class: Literal["rt", "be"] | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None
    priority: int | None = None
    model: str | None = None
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path) -> list[TraceRow]:
    """Read all rows, earliest first, the first at time 0. Raises ConfigError naming the line."""
    return parse_trace(read_lines(path), name=str(path))


def shipped_trace() -> list[TraceRow]:
    """Return the two minutes of the Azure conversation trace that the demo and the benchmarks use."""
    return read_trace(_SHIPPED)


def parse_trace(lines: Sequence[str], *, name: str) -> list[TraceRow]:
    first = next((number for number, line in enumerate(lines, start=1) if line.strip()), 1)
    lines = lines[first - 1 :]
    if is_json(lines):
        rows = _parse_lines(lines, first, _json_parser(lines[0]), name)
    else:
        rows = _parse_lines(lines[1:], first + 1, _csv_parser(columns_of(lines, name), name), name)
    if not rows:
        raise ConfigError(f"{name}: no requests in it")
    rows.sort(key=lambda row: row.arrival_s)
    return shifted(rows, rows[0].arrival_s)


def _json_parser(first: str) -> Callable[[str], TraceRow]:
    is_mooncake = any(f'"{name}"' in first for name in ("timestamp", "input_length", "output_length"))
    return _mooncake_row if is_mooncake else _in_order(_own_json_row)


def _csv_parser(columns: CsvColumns, name: str) -> Callable[[str], TraceRow | None]:
    names = set(columns.names)
    if names == set(_AZURE_COLUMNS):
        return _azure_parser(columns)
    if names.issuperset(_BURSTGPT_COLUMNS):
        return _burstgpt_parser(columns)
    if not names.isdisjoint(OWN_COLUMNS):
        return _own_csv_parser(columns, name)
    if ";" in "".join(columns.names):
        raise ConfigError(f"{name}:1: fields are separated by commas, not by ';'")
    known = " or ".join(",".join(one) for one in (OWN_COLUMNS, _AZURE_COLUMNS))
    raise ConfigError(f"{name}:1: neither the columns of a trace ({known}, or BurstGPT's) nor a JSON object")


def _parse_lines(
    lines: Iterable[str], first_number: int, parse: Callable[[str], TraceRow | None], name: str
) -> list[TraceRow]:
    rows = parsed_lines(lines, first_number, lambda line: _checked(parse(line)), name)
    return [row for row in rows if row is not None]


def _checked(row: TraceRow | None) -> TraceRow | None:
    if row is not None and not (0 < row.prompt_len <= MAX_LENGTH and 0 <= row.output_len <= MAX_LENGTH):
        raise ValueError(f"lengths {row.prompt_len} and {row.output_len} are out of range")
    return row


# --- formats of others ------------------------------------------------------------------------------------------------


def _azure_parser(columns: CsvColumns) -> Callable[[str], TraceRow]:
    def parse(line: str) -> TraceRow:
        fields = columns.fields(line)
        arrival_s, prompt_len, output_len = (fields[name] for name in _AZURE_COLUMNS)
        return TraceRow(_azure_seconds(arrival_s), int(prompt_len), int(output_len))

    return parse


def _azure_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return _time(seconds)


def _time(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds!r} is not a time")
    if seconds >= _MILLISECONDS_OF_1970:
        raise ValueError(f"{seconds:g} is no time in seconds: are these milliseconds?")
    return seconds


def _mooncake_row(line: str) -> TraceRow:
    row = msgspec.json.decode(line, type=_MooncakeRow)
    return _with_runs(TraceRow(_time(row.timestamp / 1000.0), row.input_length, row.output_length), row.hash_ids)


def _burstgpt_parser(columns: CsvColumns) -> Callable[[str], TraceRow | None]:
    def parse(line: str) -> TraceRow | None:
        fields = columns.fields(line)
        prompt_len, output_len = int(fields["Request tokens"]), int(fields["Response tokens"])
        if prompt_len == output_len == 0:
            return None  # a failed request
        model = fields["Model"].strip() or None
        return TraceRow(_time(float(fields["Timestamp"])), prompt_len, output_len, model=model)

    return parse


# --- our own ----------------------------------------------------------------------------------------------------------


def _own_csv_parser(columns: CsvColumns, name: str) -> Callable[[str], TraceRow]:
    unknown = [column for column in columns.names if column not in _OWN_KNOWN_COLUMNS]
    missing = [column for column in OWN_COLUMNS if column not in columns.names]
    if missing:
        raise ConfigError(f"{name}:1: the column {missing[0]} is missing")
    if unknown or len(set(columns.names)) < len(columns.names):
        raise ConfigError(
            f"{name}:1: {', '.join(unknown) or 'a column'} {'is unknown' if unknown else 'stands there twice'}; "
            f"the columns are {', '.join(_OWN_KNOWN_COLUMNS)}"
        )

    def parse(line: str) -> TraceRow:
        given = {column: field.strip() for column, field in columns.fields(line).items() if field.strip()}
        return _own_row(msgspec.convert(given, _OwnRow, strict=False))

    return _in_order(parse)


def _own_json_row(line: str) -> TraceRow:
    return _own_row(msgspec.json.decode(line, type=_OwnRow))


def _own_row(row: _OwnRow) -> TraceRow:
    for name in ("ttft_s", "tpot_s", "deadline_s"):
        seconds = getattr(row, name)
        if seconds is not None and not 0 < seconds < math.inf:
            raise ValueError(f"{name} {seconds!r} must be above 0")
    request_class = RequestClass(row.request_class) if row.request_class else None
    slo = Slo(row.ttft_s, row.tpot_s, row.deadline_s)
    if abs(row.priority or 0) > MAX_PRIORITY:
        raise ValueError(f"priority {row.priority} is not from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    terms = Terms(request_class, None if slo == Slo() else slo, row.priority)
    terms_or_none = None if terms == Terms() else terms
    made = TraceRow(_time(row.arrival_s), row.prompt_len, row.output_len, terms_or_none, row.model)
    return _with_runs(made, row.hash_ids)


def _with_runs(row: TraceRow, hash_ids: Sequence[int]) -> TraceRow:
    return replace(row, runs=runs_of(hash_ids, row.prompt_len)) if hash_ids else row


def _in_order(parse: Callable[[str], TraceRow]) -> Callable[[str], TraceRow]:
    latest_s = 0.0

    def checked(line: str) -> TraceRow:
        nonlocal latest_s
        row = parse(line)
        if row.arrival_s < latest_s:
            raise ValueError(f"arrival_s {row.arrival_s:g} is before the {latest_s:g} of an earlier line")
        latest_s = row.arrival_s
        return row

    return checked


# --- cutting and scaling ----------------------------------------------------------------------------------------------


def shifted(rows: Iterable[TraceRow], origin_s: float) -> list[TraceRow]:
    return [row.at(row.arrival_s - origin_s) for row in rows]


def window(rows: Sequence[TraceRow], start_s: float, duration_s: float | None) -> list[TraceRow]:
    """Return the rows of [start, start + duration), the window's start as time 0."""
    end_s = float("inf") if duration_s is None else start_s + duration_s
    chosen = [row for row in rows if start_s <= row.arrival_s < end_s]
    if not chosen:
        raise ConfigError(f"the trace has no request between {start_s:g} s and {end_s:g} s")
    return shifted(chosen, start_s)


def mean_rate(rows: Sequence[TraceRow]) -> float:
    """Return the requests per second between the first and the last arrival; 0 for fewer than two."""
    span_s = rows[-1].arrival_s - rows[0].arrival_s if rows else 0.0
    return (len(rows) - 1) / span_s if span_s > 0 else 0.0


def sped_up(rows: Iterable[TraceRow], factor: float) -> list[TraceRow]:
    """Return arrivals `factor` times as fast, in the same pattern."""
    return [row.at(row.arrival_s / factor) for row in rows]


def repeated(rows: Sequence[TraceRow], duration_s: float) -> list[TraceRow]:
    """Return the trace until `duration_s`, from its beginning again whenever it is over.

    Raises ConfigError without a rate.
    """
    return list(itertools.takewhile(lambda row: row.arrival_s < duration_s, _endless(rows)))


def at_rate(rows: Sequence[TraceRow], rate: float, duration_s: float | None, *, is_repeated: bool) -> list[TraceRow]:
    """Return the beginning of the trace, stretched so that the part played has this rate on average.

    That is the first `rate * duration_s` requests, from the beginning again where `is_repeated`; of a trace with fewer,
    or without a duration, all. Raises ConfigError for a trace without a rate of its own.
    """
    if not mean_rate(rows):
        raise ConfigError("rate=: the chosen part of the trace has no rate of its own to stretch")
    num_played = len(rows) if duration_s is None else round(rate * duration_s)
    if duration_s is None or (num_played >= len(rows) and not is_repeated):
        return sped_up(rows, rate / mean_rate(rows))
    played = list(itertools.islice(_endless(rows), num_played + 1))
    span_s = played[-1].arrival_s  # the first request that is not played
    if not (num_played and span_s):
        raise ConfigError(f"rate=: at {rate:g} requests per second nothing of the trace falls into {duration_s:g} s")
    return sped_up(played[:-1], span_s / duration_s)


def _endless(rows: Sequence[TraceRow]) -> Iterator[TraceRow]:
    if not mean_rate(rows):
        raise ConfigError("a trace whose requests all come at once cannot be repeated")
    span_s = len(rows) / mean_rate(rows)
    return (row.again(row.arrival_s + number * span_s, number) for number in itertools.count() for row in rows)
