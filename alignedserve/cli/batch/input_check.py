"""Validation of an input file before it is sent, by the server's own code."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import orjson

from alignedserve.batches.input_lines import InputValidator, LineSplitter, LineTooLong, too_long
from alignedserve.batches.records import Endpoint, LineProblem
from alignedserve.config.sections import BatchesConfig

_CHUNK_BYTES = 1024 * 1024


class FileLimits(NamedTuple):
    """Limits of a server; by default those of our default configuration."""

    max_file_bytes: int = BatchesConfig().max_file_bytes
    max_lines: int = BatchesConfig().max_lines
    max_line_bytes: int = BatchesConfig().max_line_bytes


DEFAULT_LIMITS = FileLimits()


class Checked(NamedTuple):
    """Result of a check."""

    num_lines: int
    problems: tuple[LineProblem, ...]


def check_file(
    path: Path,
    endpoint: Endpoint,
    models: Collection[str],
    on_bytes: Callable[[int], None] = lambda _: None,
    *,
    limits: FileLimits = DEFAULT_LIMITS,
) -> Checked:
    """Validate the file as a server with these limits would. Raises OSError."""
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        return Checked(0, (LineProblem(code="empty_file", message="The file is empty."),))
    if num_bytes > limits.max_file_bytes:
        message = f"The file is larger than {limits.max_file_bytes} bytes."
        return Checked(0, (LineProblem(code="body_too_large", message=message),))
    validator = InputValidator(endpoint, models, limits.max_lines)
    try:
        _read(path, validator, LineSplitter(limits.max_line_bytes), on_bytes)
    except LineTooLong as error:
        validator.problems.append(too_long(error.number, limits.max_line_bytes))
    return Checked(len(validator.index), validator.finish())


def _read(path: Path, validator: InputValidator, splitter: LineSplitter, on_bytes: Callable[[int], None]) -> None:
    num_read = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            for line in splitter.push(chunk):
                validator.check(line)
            num_read += len(chunk)
            on_bytes(num_read)
            if validator.is_full:
                return
    for line in splitter.finish():
        validator.check(line)


def endpoint_of_first_line(path: Path) -> Endpoint:
    """Return the endpoint of the first line that is not blank; chat if it names none, which validation reports."""
    with path.open("rb") as file:
        first = file.readline(BatchesConfig().max_line_bytes).removeprefix(b"\xef\xbb\xbf")
        while first.isspace():
            first = file.readline(BatchesConfig().max_line_bytes)
    try:
        return Endpoint(orjson.loads(first)["url"])
    except (orjson.JSONDecodeError, ValueError, KeyError, TypeError):
        return Endpoint.CHAT
