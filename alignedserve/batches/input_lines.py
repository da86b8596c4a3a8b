"""From the bytes of an input file to its lines, and what makes a line one that can be run."""

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from alignedserve.batches.records import Endpoint, LineProblem

MAX_CUSTOM_ID_LEN = 512
MAX_PROBLEMS = 100  # listed of one file; reading ends there
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_MEMBERS = frozenset({"custom_id", "method", "url", "body"})
_MAX_ECHOED_LEN = 64


class RawLine(NamedTuple):
    """One line of the file, without its end."""

    number: int  # from 1, as editors count
    offset: int  # of its first byte in the file
    text: bytes


class LineTooLong(ValueError):
    """A line that goes on past the limit; nothing behind it is read."""

    def __init__(self, number: int) -> None:
        super().__init__(f"line {number} is too long")
        self.number = number


class LineSplitter:
    """Feed bytes, get lines. A byte-order mark, CRLF and a last line without an end are fine, blank lines nothing."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = b""
        self._rest_offset = 0
        self._number = 0

    def push(self, chunk: bytes) -> list[RawLine]:
        """Lines that this chunk completes. Raises LineTooLong."""
        lines, start = [], 0
        whole = self._rest + chunk
        while (end := whole.find(b"\n", start)) >= 0:
            lines.append(self._line(whole[start:end], self._rest_offset + start))
            start = end + 1
        self._rest = whole[start:]
        self._rest_offset += start
        if len(self._rest) > self._max_line_bytes:
            raise LineTooLong(self._number + 1)
        return [line for line in lines if line.text]

    def end(self) -> list[RawLine]:
        """The last line, where it has no end of its own. Raises LineTooLong."""
        line = self._line(self._rest, self._rest_offset)
        self._rest = b""
        return [line] if line.text else []

    def _line(self, raw: bytes, offset: int) -> RawLine:
        self._number += 1
        if len(raw) > self._max_line_bytes:
            raise LineTooLong(self._number)
        if offset == 0 and raw.startswith(_BOM):
            raw, offset = raw[len(_BOM) :], len(_BOM)
        text = raw.rstrip(b"\r")
        return RawLine(self._number, offset, b"" if text.isspace() else text)


class LineIndex:
    """Where each request of a file lies. 12 bytes per line: it is kept in memory while the batch runs."""

    def __init__(self) -> None:
        self._offsets = array("Q")
        self._lengths = array("I")

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, line: RawLine) -> None:
        """The next request."""
        self._offsets.append(line.offset)
        self._lengths.append(len(line.text))

    def place(self, line: int) -> tuple[int, int]:
        """Offset and length of a request, counted from 0."""
        return self._offsets[line], self._lengths[line]

    @property
    def num_bytes(self) -> int:
        """Of all requests."""
        return sum(self._lengths)


class LineRequest(NamedTuple):
    """A line that passed validation."""

    custom_id: str
    body: dict[str, Any]


def parse_line(text: bytes) -> LineRequest:
    """A line that passed validation before."""
    parsed = orjson.loads(text)
    return LineRequest(parsed["custom_id"], parsed["body"])


@dataclass(slots=True)
class Inspection:
    """Reads a file's lines in order and collects what is wrong with them."""

    endpoint: Endpoint
    models: Collection[str]  # served here
    max_lines: int
    index: LineIndex = field(default_factory=LineIndex)
    problems: list[LineProblem] = field(default_factory=list)
    model: str | None = None  # of the first line
    _custom_ids: set[bytes] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """Whether reading on would tell nothing that is listed."""
        return len(self.problems) >= MAX_PROBLEMS

    def look_at(self, line: RawLine) -> None:
        """Take the next line."""
        if self.is_over:
            return
        if len(self.index) >= self.max_lines:
            message = f"The file has more than {self.max_lines} requests."
            self.problems = [LineProblem(code="too_many_requests", message=message, line=line.number)] * MAX_PROBLEMS
            return
        self.index.add(line)
        problem = self._problem_of(line)
        if problem is not None:
            self.problems.append(problem)

    def end(self) -> tuple[LineProblem, ...]:
        """No more lines: everything that is wrong."""
        self._custom_ids = set()  # as large as the file has lines, and of no more use
        if not len(self.index) and not self.problems:
            return (LineProblem(code="empty_file", message="The file holds no requests."),)
        if self.problems and self.problems[0].code == "too_many_requests":
            return (self.problems[0],)
        return tuple(self.problems[:MAX_PROBLEMS])

    def _problem_of(self, line: RawLine) -> LineProblem | None:
        try:
            parsed = orjson.loads(line.text)
        except orjson.JSONDecodeError:
            return _not_json(line)
        if not isinstance(parsed, dict):
            return _problem("invalid_json_line", "This line is not a JSON object.", None, line.number)
        return self._problem_of_id(parsed, line.number) or self._problem_of_call(parsed, line.number)

    def _problem_of_id(self, parsed: dict[str, Any], number: int) -> LineProblem | None:
        custom_id = parsed.get("custom_id")
        if custom_id is None:
            return _problem("missing_required_parameter", "custom_id is missing.", "custom_id", number)
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_LEN:
            message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_LEN} characters."
            return _problem("invalid_value", message, "custom_id", number)
        digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._custom_ids:
            message = f"custom_id {custom_id[:_MAX_ECHOED_LEN]!r} was used by an earlier line."
            return _problem("duplicate_custom_id", message, "custom_id", number)
        self._custom_ids.add(digest)
        return None

    def _problem_of_call(self, parsed: dict[str, Any], number: int) -> LineProblem | None:
        if parsed.get("method") != "POST":
            return _problem("invalid_method", "method must be 'POST'.", "method", number)
        if parsed.get("url") != self.endpoint.value:
            message = f"url must be the batch's endpoint, {self.endpoint.value}."
            return _problem("mismatched_endpoint", message, "url", number)
        body = parsed.get("body")
        if not isinstance(body, dict):
            return _problem("missing_required_parameter", "body must be a JSON object.", "body", number)
        unknown = parsed.keys() - _MEMBERS
        if unknown:
            name = min(unknown)[:_MAX_ECHOED_LEN]
            return _problem("unknown_parameter", f"Unrecognized member: {name!r}.", name, number)
        model = body.get("model")
        if not isinstance(model, str) or model not in self.models:
            message = "The requested model does not exist here; see /v1/models."
            return _problem("model_not_found", message, "body.model", number)
        self.model = self.model or model
        return None


def too_long(number: int, max_line_bytes: int) -> LineProblem:
    """A line past the limit."""
    return _problem("line_too_long", f"This line is longer than {max_line_bytes} bytes.", None, number)


def _not_json(line: RawLine) -> LineProblem:
    if line.number == 1 and line.text.startswith(_GZIP):
        return _problem("invalid_json_line", "The file is compressed; send plain JSON lines.", None, 1)
    return _problem("invalid_json_line", "This line is not parseable as valid JSON.", None, line.number)


def _problem(code: str, message: str, param: str | None, number: int) -> LineProblem:
    return LineProblem(code=code, message=message, param=param, line=number)
