"""Lines of an input file: splitting its bytes, validating each line, indexing for random access.

The input file of one batch: validated from beginning to end, then read line by line while lines run."""

import re
from array import array
from collections.abc import AsyncIterator, Container, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import orjson
import xxhash

from alignedserve.batches.interfaces import BlobReader, BlobStore
from alignedserve.batches.logic import Validated, ValidationFailed
from alignedserve.batches.records import BatchRecord, Endpoint, LineProblem, is_client
from alignedserve.config.sections import BatchesConfig
from alignedserve.core.errors import StorageDamaged, StorageError

_LENGTHS = (256, 1024, 4096, 16384)  # bytes from the member on that holds the prompt
_PROMPTS = (b'"messages"', b'"prompt"', b'"input"')
MAX_CUSTOM_ID_LEN = 512
MAX_PROBLEMS = 100  # listed per file; reading ends there
_BLANK_LINES = re.compile(rb"(?:[ \t\r]{0,64}+\n)+")  # each far below any limit of lines
_BOM = b"\xef\xbb\xbf"
_COMPRESSED = (
    b"\x1f\x8b",
    b"PK\x03\x04",
    b"\xfd7zXZ\x00",
    b"BZh",
    b"\x28\xb5\x2f\xfd",
)  # by gzip, ZIP, xz, bzip2, zstd
_WIDE = (b"\xff\xfe", b"\xfe\xff", b"{\x00", b"\x00{", b"\x00\x00\xfe\xff", b"\x00\x00\x00{")  # with a mark, or without
_MEMBERS = frozenset({"custom_id", "method", "url", "body"})
_MAX_ECHOED_LEN = 64


class CommonBeginnings:
    """Digests of the beginnings of a file's prompts, 32 bytes a line.

    Lines with a common prefix run one after the other. The prefix is then computed once, and all later lines find it in
    the prefix cache, however small that is. Example: a file has ten questions about each of 1 000 documents, all first
    questions before all second ones. A worker that keeps 50 documents would compute every document ten times; in this
    order it computes each once.

    Prefixes are compared at four lengths, by digests. Lines with 16 KiB in common stand together inside a group with 4
    KiB in common, and so on. Otherwise lines keep the order of the file; a group stands at the place of its first line.
    """

    def __init__(self) -> None:
        self._digests = tuple(array("Q") for _ in _LENGTHS)

    def add(self, text: bytes) -> None:
        start = next((at for member in _PROMPTS if (at := text.find(member)) >= 0), 0)
        for digests, length in zip(self._digests, _LENGTHS, strict=True):
            digests.append(xxhash.xxh3_64_intdigest(text[start : start + length]))

    def order(self) -> Sequence[int]:
        num_lines = len(self._digests[0])
        firsts = [_first_alike(np.frombuffer(digests, np.uint64)) for digests in self._digests] if num_lines else []
        if not firsts or np.array_equal(firsts[0], np.arange(num_lines)):
            return range(num_lines)
        ordered = np.lexsort((np.arange(num_lines), *reversed(firsts)))
        return array("I", ordered.astype(np.uint32).tobytes())


def _first_alike(digests: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    return first[group]


class RawLine(NamedTuple):
    """One line of the file, without its end."""

    number: int  # from 1, as editors count
    offset: int  # of its first byte in the file
    text: bytes


class LineTooLong(ValueError):
    """A line longer than the limit; nothing behind it is read."""

    def __init__(self, number: int) -> None:
        super().__init__(f"line {number} is too long")
        self.number = number


class LineSplitter:
    """Splits bytes into lines. Accepts a byte-order mark, CRLF and a last line without an end; skips blank lines."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest: list[bytes] = []  # the beginning of a line, in pieces: joined once, however many there are
        self._rest_len = 0
        self._rest_offset = 0
        self._number = 0

    def push(self, chunk: bytes) -> list[RawLine]:
        """Return the lines that this chunk completes. Raises LineTooLong."""
        lines, start = [], 0
        if b"\n" not in chunk:
            self._keep(chunk)
            return []
        whole = self._taken() + chunk
        while (end := whole.find(b"\n", start)) >= 0:
            if blank := _BLANK_LINES.match(whole, start):  # at once: a file may have a hundred million of them
                self._number += whole.count(b"\n", start, blank.end())
                start = blank.end()
                continue
            lines.append(self._line(whole[start:end], self._rest_offset + start))
            start = end + 1
        self._rest_offset += start
        self._keep(whole[start:])
        return [line for line in lines if line.text]

    def finish(self) -> list[RawLine]:
        """Return the last line if it has no line end. Raises LineTooLong."""
        line = self._line(self._taken(), self._rest_offset)
        return [line] if line.text else []

    def _keep(self, piece: bytes) -> None:
        self._rest.append(piece)
        self._rest_len += len(piece)
        if self._rest_len > self._max_line_bytes:
            raise LineTooLong(self._number + 1)

    def _taken(self) -> bytes:
        rest = b"".join(self._rest)
        self._rest, self._rest_len = [], 0
        return rest

    def _line(self, raw: bytes, offset: int) -> RawLine:
        self._number += 1
        if len(raw) > self._max_line_bytes:
            raise LineTooLong(self._number)
        if offset == 0 and raw.startswith(_BOM):
            raw, offset = raw[len(_BOM) :], len(_BOM)
        text = raw.rstrip(b"\r")
        return RawLine(self._number, offset, b"" if text.isspace() else text)


class LineIndex:
    """Offset, length and beginning of each request in a file: 44 bytes per line, in memory while the batch runs."""

    def __init__(self) -> None:
        self.beginnings = CommonBeginnings()
        self._offsets = array("Q")
        self._lengths = array("I")

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, line: RawLine) -> None:
        self._offsets.append(line.offset)
        self._lengths.append(len(line.text))
        self.beginnings.add(line.text)

    def span(self, line: int) -> tuple[int, int]:
        return self._offsets[line], self._lengths[line]


class ParsedLine(NamedTuple):
    """A line that passed validation."""

    custom_id: str
    body: dict[str, Any]


def parse_line(text: bytes) -> ParsedLine:
    parsed = orjson.loads(text)
    return ParsedLine(parsed["custom_id"], parsed["body"])


@dataclass(slots=True)
class InputValidator:
    """Checks the lines of a file in order and collects the problems."""

    endpoint: Endpoint
    models: Container[str]  # served here
    max_lines: int
    index: LineIndex = field(default_factory=LineIndex)
    problems: list[LineProblem] = field(default_factory=list)
    lines_by_model: dict[str, int] = field(default_factory=dict)  # of models that are served
    _custom_ids: set[bytes] = field(default_factory=set)
    _of_file: LineProblem | None = None  # that makes those of its lines meaningless

    @property
    def is_full(self) -> bool:
        """Return True if no further problem would be listed."""
        return self._of_file is not None or len(self.problems) >= MAX_PROBLEMS

    def check(self, line: RawLine) -> None:
        """Check and index the next line."""
        if self.is_full:
            return
        if len(self.index) >= self.max_lines:
            message = f"The file has more than {self.max_lines} requests."
            self._of_file = LineProblem(code="too_many_requests", message=message, line=line.number)
            return
        self.index.add(line)
        problem = self._problem_of(line)
        if problem is not None:
            self._of_file = _problem_of_file(line)
            self.problems.append(problem)

    def finish(self) -> tuple[LineProblem, ...]:
        """Return all problems, after the last line."""
        self._custom_ids = set()  # large, and not needed any more
        if not len(self.index) and not self.problems:
            return (LineProblem(code="empty_file", message="The file holds no requests."),)
        if self._of_file is not None:
            return (self._of_file,)
        return tuple(self.problems[:MAX_PROBLEMS])

    def _problem_of(self, line: RawLine) -> LineProblem | None:
        try:
            parsed = orjson.loads(line.text)
        except orjson.JSONDecodeError:
            if not _is_utf8(line.text):
                return _problem("invalid_json_line", "This line is not text in UTF-8.", None, line.number)
            return _problem("invalid_json_line", "This line is not parseable as valid JSON.", None, line.number)
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
        if model is None:
            return _problem("missing_required_parameter", "body.model is missing.", "body.model", number)
        if not isinstance(model, str) or model not in self.models:
            message = "The requested model does not exist here; see /v1/models."
            return _problem("model_not_found", message, "body.model", number)
        self.lines_by_model[model] = self.lines_by_model.get(model, 0) + 1
        return None


def too_long(number: int, max_line_bytes: int) -> LineProblem:
    """Build the problem of a line longer than the limit."""
    return _problem("line_too_long", f"This line is longer than {max_line_bytes} bytes.", None, number)


def _problem_of_file(line: RawLine) -> LineProblem | None:
    if line.number == 1 and line.text.startswith(_COMPRESSED):
        return _problem("invalid_json_line", "The file is compressed; send plain JSON lines.", None, 1)
    if line.number == 1 and line.text.startswith(_WIDE):
        message = "The file is not text in UTF-8, but likely in UTF-16; save it as UTF-8."
        return _problem("invalid_json_line", message, None, 1)
    return None


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _problem(code: str, message: str, param: str | None, number: int) -> LineProblem:
    return LineProblem(code=code, message=message, param=param, line=number)


class _AnyModel:
    def __contains__(self, name: object) -> bool:
        return True


class InputFile:
    """Lines of one batch. Await `scan` first, then `open`; only then can lines be read."""

    def __init__(self, record: BatchRecord, blobs: BlobStore, config: BatchesConfig, models: Container[str]) -> None:
        self._record = record
        self._blobs = blobs
        # Limits hold for files that are validated: since this one was, they may have been lowered.
        self._max_line_bytes = max(config.max_line_bytes, record.input_bytes if record.num_lines else 0)
        # Other APIs than Files looked for each line's model when they made the batch, and know no errors of a whole
        # file: a model that is gone since fails its lines, each with a result.
        self._validator = InputValidator(
            record.endpoint, models if is_client(record.owner) else _AnyModel(), config.max_lines
        )
        self._reader: BlobReader | None = None

    async def scan(self) -> AsyncIterator[int]:
        """Read the file; yield the number of lines so far after each chunk. A batch that was validated before is only
        indexed: the served models may have changed since."""
        splitter = LineSplitter(self._max_line_bytes)
        add = self._validator.index.add if self._record.num_lines else self._validator.check
        try:
            async for chunk in self._blobs.chunks(self._record.input_file_id):
                for line in splitter.push(chunk):
                    add(line)
                yield len(self._validator.index)
                if self._validator.is_full:
                    return
            for line in splitter.finish():
                add(line)
        except LineTooLong as error:
            self._validator.problems.append(too_long(error.number, self._max_line_bytes))
        except StorageDamaged as error:
            self._validator.problems.append(LineProblem(code="file_unreadable", message=str(error)))

    def validation(self) -> Validated | ValidationFailed:
        problems = self._validator.finish()
        if problems:
            return ValidationFailed(problems)
        num_lines, by_model = len(self._validator.index), self._validator.lines_by_model
        if len(by_model) == 1:
            return Validated(num_lines, next(iter(by_model)))
        return Validated(num_lines, None, by_model)

    async def open(self) -> None:
        """Open the file for reading single lines. Raises StorageDamaged, also where it has lost lines, or gained some,
        since it was validated: then those that are there can be read."""
        self._reader = await self._blobs.open(self._record.input_file_id)
        if self._record.num_lines not in (0, len(self._validator.index)):
            raise StorageDamaged("the input file has changed since it was validated")

    def line(self, line: int) -> ParsedLine:
        if self._reader is None:
            raise StorageDamaged("the input file cannot be read")
        return parse_line(self._reader.read_at(*self._validator.index.span(line)))

    def custom_id(self, line: int) -> str:
        """Return a line's custom_id; where the file is damaged since it was validated, what tells which line it was."""
        try:
            return self.line(line).custom_id
        except (StorageError, ValueError, LookupError, TypeError):
            return f"unreadable line {line + 1}"

    def model(self, line: int) -> str:
        """Return the model that a line names; where the file is damaged since it was validated, none."""
        try:
            return str(self.line(line).body.get("model", ""))
        except (StorageError, ValueError, LookupError, TypeError):
            return ""

    def order(self) -> Sequence[int]:
        """Return the lines in the order in which they should run (input_lines.py)."""
        return self._validator.index.beginnings.order()

    def line_bytes(self, line: int) -> int:
        return self._validator.index.span(line)[1]

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
