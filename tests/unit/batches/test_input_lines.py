"""Splitting an input file into lines, and what is wrong with them."""

import bz2
import gzip
import io
import json
import lzma
import random
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from alignedserve.batches import input_lines
from alignedserve.batches.input_lines import (
    MAX_PROBLEMS,
    InputValidator,
    LineSplitter,
    LineTooLong,
    RawLine,
    parse_line,
)
from alignedserve.batches.records import Endpoint, LineProblem
from tests.support.batch_samples import chat_line, chat_lines
from tests.support.marks import each


def split(content: bytes, chunk: int = 7, limit: int = 1000) -> list[RawLine]:
    splitter = LineSplitter(limit)
    lines = [line for start in range(0, len(content), chunk) for line in splitter.push(content[start : start + chunk])]
    return lines + splitter.finish()


@each("chunk", [1, 2, 3, 100])
def test_lines_whatever_the_chunks(chunk: int) -> None:
    content = b"\xef\xbb\xbfone\r\ntwo\n\n   \nthree"
    lines = split(content, chunk)
    assert [(line.number, line.text) for line in lines] == [(1, b"one"), (2, b"two"), (5, b"three")]
    assert [content[line.offset : line.offset + len(line.text)] for line in lines] == [b"one", b"two", b"three"]


def test_nothing_and_only_line_ends() -> None:
    assert split(b"") == split(b"\n\r\n\n") == []


def test_blank_lines_are_passed_over_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may have 200 million: one by one they would hold up the driver, and all gateways' records, for minutes."""
    made: list[RawLine] = []

    def counted(*fields: Any) -> RawLine:
        made.append(RawLine(*fields))
        return made[-1]

    monkeypatch.setattr(input_lines, "RawLine", counted)
    lines = LineSplitter(1000).push(b"\r\n \t\n\n" * 10_000 + b"{}\n")
    assert lines == made == [RawLine(30_001, 60_000, b"{}")]


def test_a_line_past_the_limit_ends_the_reading() -> None:
    with pytest.raises(LineTooLong) as complete:
        split(b"ok\n" + b"x" * 60 + b"\n", limit=50)
    with pytest.raises(LineTooLong) as open_ended:
        split(b"ok\n\n" + b"x" * 60, limit=50)
    assert (complete.value.number, open_ended.value.number) == (2, 3)


def inspected(content: bytes, max_lines: int = 50) -> tuple[LineProblem, ...]:
    validator = InputValidator(Endpoint.CHAT, ("tiny",), max_lines)
    for line in split(content, 1000, 10_000):
        validator.check(line)
    return validator.finish()


def test_a_good_file() -> None:
    validator = InputValidator(Endpoint.CHAT, ("tiny",), 50)
    content = chat_lines(3)
    for line in split(content):
        validator.check(line)
    offset, length = validator.index.span(2)
    assert validator.finish() == ()
    assert (len(validator.index), validator.lines_by_model) == (3, {"tiny": 3})
    assert parse_line(content[offset : offset + length]).custom_id == "line-2"


def changed(**members: Any) -> bytes:
    line = json.loads(chat_line("b")) | members
    return json.dumps({name: value for name, value in line.items() if value is not ...}).encode()


BAD_LINES = [
    (b"{not json", "invalid_json_line", None),
    (b"[1, 2]", "invalid_json_line", None),
    (b'"text"', "invalid_json_line", None),
    (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
    (b'{"custom_id": "\xff"}', "invalid_json_line", None),
    (changed(custom_id=...), "missing_required_parameter", "custom_id"),
    (changed(custom_id=7), "invalid_value", "custom_id"),
    (changed(custom_id=""), "invalid_value", "custom_id"),
    (changed(custom_id="x" * 513), "invalid_value", "custom_id"),
    (chat_line("a"), "duplicate_custom_id", "custom_id"),
    (changed(method="GET"), "invalid_method", "method"),
    (changed(method=...), "invalid_method", "method"),
    (changed(url="/v1/completions"), "mismatched_endpoint", "url"),
    (changed(url="/v1/embeddings"), "mismatched_endpoint", "url"),
    (changed(url=["/v1/chat/completions"]), "mismatched_endpoint", "url"),
    (changed(body=...), "missing_required_parameter", "body"),
    (changed(body="{}"), "missing_required_parameter", "body"),
    (changed(body={"messages": []}), "missing_required_parameter", "body.model"),
    (chat_line("b", model="gpt-4o"), "model_not_found", "body.model"),
    (chat_line("b", model=["tiny"]), "model_not_found", "body.model"),
    (changed(extra=1), "unknown_parameter", "extra"),
]


@each(("line", "code", "param"), BAD_LINES)
def test_a_bad_line_is_named_by_its_number(line: bytes, code: str, param: str | None) -> None:
    problems = inspected(b"\n".join([chat_line("a"), b"", line, chat_line("z")]))
    assert [(problem.code, problem.param, problem.line) for problem in problems] == [(code, param, 3)]


def test_several_bad_lines_are_listed_up_to_a_limit() -> None:
    assert [problem.line for problem in inspected(b"{\n" + chat_line() + b"\n{\n")] == [1, 3]
    assert len(inspected(b"{\n" * (MAX_PROBLEMS + 20), max_lines=500)) == MAX_PROBLEMS


@each("content", [b"", b"\n", b"\xef\xbb\xbf", b"  \r\n\t\n"])
def test_an_empty_file(content: bytes) -> None:
    assert [problem.code for problem in inspected(content)] == ["empty_file"]


def test_one_line_too_many() -> None:
    assert inspected(chat_lines(50)) == ()
    problems = inspected(chat_lines(51) + b"{")
    assert [(problem.code, problem.line) for problem in problems] == [("too_many_requests", 51)]


def zipped(content: bytes) -> bytes:
    with zipfile.ZipFile(made := io.BytesIO(), "w") as archive:
        archive.writestr("in.jsonl", content)
    return made.getvalue()


@each("compress", [partial(gzip.compress, mtime=0), lzma.compress, bz2.compress, zipped])
def test_a_compressed_file_is_one_problem(compress: Callable[[bytes], bytes]) -> None:
    (problem,) = inspected(compress(b"\n".join([chat_lines(3), random.Random(0).randbytes(4096)])))
    assert (problem.code, problem.line) == ("invalid_json_line", 1)
    assert problem.message == "The file is compressed; send plain JSON lines."


@each("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_file_of_wide_characters_is_one_problem(encoding: str) -> None:
    (problem,) = inspected(chat_lines(3).decode().encode(encoding))
    assert (problem.code, problem.line) == ("invalid_json_line", 1)
    assert problem.message == "The file is not text in UTF-8, but likely in UTF-16; save it as UTF-8."


def test_another_encoding_is_named_by_line() -> None:
    problems = inspected('{"custom_id": "é"}\n{"custom_id": "ä"}'.encode("latin-1"))
    assert {problem.message for problem in problems} == {"This line is not text in UTF-8."}
    assert [problem.line for problem in problems] == [1, 2]


def test_custom_ids_may_be_any_text() -> None:
    assert inspected(b"\n".join(chat_line(custom_id) for custom_id in ("é", "../a", " ", "\x00"))) == ()
