"""Tables of documents: rows of a CSV, JSONL or Parquet file, read again and again, and written one by one.

A table that cannot be read whole is refused: a stray quote must not swallow rows. Parquet is in parquet.py, which alone
needs pyarrow."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from alignedserve.core.errors import ConfigError

Row = Mapping[str, Any]
Kinds = dict[str, str]  # of columns, in order: string, integer, number, boolean, or json for all else

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
_MAX_CELL_LEN = 64 * 1024 * 1024
_MAX_COLUMNS = 10_000
_DELIMITERS = ",;\t"  # the most frequent one of a header divides
_BOM = "\ufeff"
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean"}


class RowTable(Protocol):
    """A file of rows. Every reading raises ConfigError for a file that is not a table."""

    columns: Kinds

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        """Yield all rows, from the first on, with these columns at least."""


def open_table(path: Path, limit: int | None = None) -> RowTable:
    """Open the first rows of a table, all without a limit, by the suffix of its name. Raises ConfigError."""
    suffix = checked_suffix("FILE", path)
    if not path.is_file():
        raise ConfigError(f"FILE {path}: must be a regular file, as it is read more than once")
    if suffix == ".parquet":
        table: RowTable = parquet().ParquetTable(path, limit)
        return table
    return JsonlTable(path, limit) if suffix in (".jsonl", ".ndjson") else CsvTable(path, limit)


def checked_suffix(option: str, path: Path) -> str:
    """Return the suffix, if tables of its kind can be read and written here. Raises ConfigError."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"{option} {path}: its name must end in one of {', '.join(SUFFIXES)}")
    if suffix == ".parquet":
        parquet()
    return suffix


def parquet() -> Any:
    try:
        from alignedserve.cli.batch import parquet as module  # loads pyarrow
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install 'alignedserve[tables]'") from error
    return module


def delimiter_of(path: Path, usual: str) -> str:
    is_tabbed = path.suffix.lower() == ".tsv"
    return "\t" if is_tabbed else usual


class CsvTable:
    """Cells are text as it stands there."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self._path, self._limit = path, limit
        try:
            with path.open(encoding="utf-8", newline="") as file:
                header = next(filter(str.strip, file), "")
        except UnicodeDecodeError as error:
            raise _not_utf8(path) from error
        self.has_bom = header.startswith(_BOM)
        outside_quotes = "".join(header.split('"')[::2])
        self.delimiter = delimiter_of(path, max(_DELIMITERS, key=outside_quotes.count))
        names = next(self._cells(), [])
        if not names:
            raise ConfigError(f"{path} has no header")
        self.columns = dict.fromkeys(names, "string")
        if len(self.columns) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{path}: its header has the column {twice!r} twice")

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        rows = self._cells()
        header = next(rows)
        for cells in islice(rows, self._limit):
            yield dict(zip(header, cells, strict=True))

    def _cells(self) -> Iterator[list[str]]:
        csv.field_size_limit(_MAX_CELL_LEN)
        with self._path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=self.delimiter, strict=True)
            num_columns = None
            try:
                for cells in filter(None, reader):  # blank lines are no rows
                    num_columns = num_columns or len(cells)
                    if len(cells) != num_columns:
                        raise ConfigError(
                            f"{self._path} line {reader.line_num}: {len(cells)} cells under {num_columns} columns"
                        )
                    yield cells
            except csv.Error as error:
                raise ConfigError(f"{self._path} line {reader.line_num}: {error}") from error
            except UnicodeDecodeError as error:
                raise _not_utf8(self._path) from error


class JsonlTable:
    """Columns are all that any row has; a row without one has null there."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self._path, self._limit = path, limit
        types: dict[str, set[str]] = {}
        for row in self._objects():
            for name, value in row.items():
                types.setdefault(name, set()).add(_kind_of(value))
            if len(types) > _MAX_COLUMNS:
                raise ConfigError(f"{path} has more than {_MAX_COLUMNS} columns")
        if not types:
            raise ConfigError(f"{path} has no rows")
        self.columns = {name: _common_kind(kinds - {"null"}) for name, kinds in types.items()}

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        for row in islice(self._objects(), self._limit):
            yield {name: row.get(name) for name in self.columns}

    def _objects(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = None if line.isspace() else parsed(line.decode().removeprefix(_BOM))
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{self._path} line {number} is not JSON in UTF-8") from error
                if isinstance(row, dict):
                    yield row
                elif not line.isspace():
                    raise ConfigError(f"{self._path} line {number} is not a JSON object")


def parsed(text: str) -> Any:
    """Parse JSON; half a character, as a cut emoji leaves it, becomes a question mark. Raises ValueError."""
    value = json.loads(text)
    if "\\ud" not in text.lower():
        return value
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def text_of(value: Any) -> str:
    """Return a cell as text: for a prompt, or a CSV file."""
    if value is None or value != value:  # the number that is none
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, list | dict):
        return _json(value)
    return str(value)


def _json(value: Any) -> str:
    """Return JSON; infinity and NaN become null."""
    text = json.dumps(value, ensure_ascii=False, default=text_of)
    if "NaN" not in text and "Infinity" not in text:
        return text
    return json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)


def write_table(path: Path, table: RowTable, columns: Sequence[str], results: Iterator[Row], kinds: Kinds) -> None:
    """Write these columns of a table, and beside each row its result, whose columns are `kinds`. Raises OSError."""
    suffix = checked_suffix("--output", path)
    if suffix == ".parquet":
        parquet().write_table(path, table, columns, results, kinds)
    elif suffix in (".jsonl", ".ndjson"):
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json_lines(table, columns, results))
    else:
        like = table if isinstance(table, CsvTable) else None
        encoding = "utf-8-sig" if like and like.has_bom else "utf-8"
        with path.open("w", encoding=encoding, newline="") as file:
            writer = csv.writer(file, delimiter=delimiter_of(path, like.delimiter if like else ","))
            writer.writerow([*columns, *kinds])
            for row in with_results(table, columns, results):
                writer.writerow(map(text_of, row.values()))


def with_results(table: RowTable, columns: Sequence[str], results: Iterator[Row]) -> Iterator[dict[str, Any]]:
    for row, result in zip(table.rows(columns), results, strict=True):
        yield {**{name: row[name] for name in columns}, **result}


def json_lines(table: RowTable, columns: Sequence[str], results: Iterator[Row]) -> Iterator[str]:
    for row in with_results(table, columns, results):
        yield _json(row) + "\n"


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    kind = _KINDS.get(type(value), "json")
    return "json" if kind == "integer" and not fits(value) else kind


def fits(number: int) -> bool:
    return -(1 << 63) <= number < 1 << 63


def _common_kind(kinds: set[str]) -> str:
    if kinds == {"integer", "number"}:
        return "number"
    return kinds.pop() if len(kinds) == 1 else "json"


def _not_utf8(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not text in UTF-8; save it as UTF-8")
