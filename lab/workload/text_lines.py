"""Lines of a file, plain or gzipped, and complaints that name the line."""

import csv
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from alignedserve.core.errors import ConfigError

MAX_LENGTH = 10_000_000  # tokens; a larger number in a file is a mistake
_GZIP_MAGIC = b"\x1f\x8b"
Row = TypeVar("Row")


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file. Raises ConfigError."""
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig").split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: cannot be read: {why}") from error


def parsed_lines(lines: Iterable[str], first_number: int, parse: Callable[[str], Row], name: str) -> Iterator[Row]:
    """Yield every parsed line that is not empty.

    Raises ConfigError naming file and line where `parse` raises ValueError.
    """
    for number, line in enumerate(lines, start=first_number):
        if not line.strip():
            continue
        try:
            yield parse(line)
        except (ValueError, msgspec.DecodeError) as error:
            raise ConfigError(f"{name}:{number}: {error}") from error


def parse_length(text: str, *, least: int = 0) -> int:
    length = int(text)
    if not least <= length <= MAX_LENGTH:
        raise ValueError(f"length {length} is out of range")
    return length


class CsvColumns:
    """CsvColumns of a CSV header, and the fields of a line by column. Raises ValueError for quotes that do not end."""

    def __init__(self, header: str) -> None:
        self.names = tuple(name.strip() for name in _split(header))

    def fields(self, line: str) -> dict[str, str]:
        """Return the fields of a line by column. Raises ValueError when there are too few or too many."""
        fields = _split(line)
        if len(fields) != len(self.names):
            raise ValueError(f"{len(fields)} fields where {len(self.names)} are expected")
        return dict(zip(self.names, fields, strict=True))


def is_json(lines: Sequence[str]) -> bool:
    """Return whether each line is an object, and the first one no header."""
    return bool(lines) and lines[0].lstrip().startswith("{")


def columns_of(lines: Sequence[str], name: str) -> CsvColumns:
    """Return the columns that the first line names. Raises ConfigError with the file's name."""
    return next(parsed_lines(lines[:1], 1, CsvColumns, name), CsvColumns(""))


def _split(line: str) -> list[str]:
    line = line.rstrip("\r")
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise ValueError(f"{error} in {line[:80]!r}") from error
