"""Parquet files as tables: columns keep their types."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from alignedserve.cli.batch.tables import Kinds, Row, RowTable, fits, text_of
from alignedserve.core.errors import ConfigError

_BATCH_ROWS = 500
_BUFFER_BYTES = 1024 * 1024  # of a column: row groups may be larger than memory
_TYPES = {"integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}


class ParquetTable:
    """Dates, times and durations are text in rows: Python's have microseconds only."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self._path, self._limit = path, limit
        with _readable(path), pq.ParquetFile(path) as file:
            self.schema = file.schema_arrow
        names = self.schema.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{path} has the column {twice!r} twice")
        self.columns = dict.fromkeys(names, "json")

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        kinds = {name: _plain(self.schema.field(name).type) for name in names}
        with _readable(self._path):
            for batch in self.batches():
                columns = {name: batch.column(name).cast(kind).to_pylist() for name, kind in kinds.items()}
                for number in range(batch.num_rows):
                    yield {name: cells[number] for name, cells in columns.items()}

    def batches(self) -> Iterator[pa.RecordBatch]:
        num_left = sys.maxsize if self._limit is None else self._limit
        with _readable(self._path), pq.ParquetFile(self._path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield batch[:num_left]
                num_left -= min(num_left, batch.num_rows)
                if not num_left:
                    return


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error


def write_table(path: Path, table: RowTable, columns: Sequence[str], results: Iterator[Row], kinds: Kinds) -> None:
    """Write these columns of a table, and beside each row its result. Raises OSError."""
    batches = table.batches() if isinstance(table, ParquetTable) else _batches(table)
    if isinstance(table, ParquetTable):
        schema = pa.schema([table.schema.field(name) for name in columns], table.schema.metadata)
    else:
        schema = _schema({name: table.columns[name] for name in columns})
    added = _schema(kinds)
    whole = pa.schema([*schema, *added], schema.metadata)
    with pq.ParquetWriter(path, whole) as writer:
        for batch in batches:
            beside = _batch(list(islice(results, batch.num_rows)), kinds)
            arrays = [batch.column(name) for name in schema.names] + beside.columns
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=whole))


def _batches(table: RowTable) -> Iterator[pa.RecordBatch]:
    rows = table.rows(list(table.columns))
    while chunk := list(islice(rows, _BATCH_ROWS)):
        yield _batch(chunk, table.columns)


def _batch(rows: list[Row], kinds: Kinds) -> pa.RecordBatch:
    cells = [
        pa.array([cell(row[name], kind) for row in rows], _TYPES.get(kind, pa.string())) for name, kind in kinds.items()
    ]
    return pa.RecordBatch.from_arrays(cells, schema=_schema(kinds))


def _schema(kinds: Kinds) -> pa.Schema:
    return pa.schema([(name, _TYPES.get(kind, pa.string())) for name, kind in kinds.items()])


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type with text in place of every time, within lists and structs too."""
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    return pa.list_(_plain(kind.value_type)) if pa.types.is_nested(kind) else kind


def cell(value: Any, kind: str) -> Any:
    """Return a value as a cell of its column's type; null where it has another."""
    if value is None or kind not in _TYPES:
        return None if value is None else text_of(value)
    if isinstance(value, bool) != (kind == "boolean") or not isinstance(value, int | float):
        return None
    try:
        if kind == "integer":
            return int(value) if value == int(value) and fits(int(value)) else None
        return float(value) if kind == "number" else value
    except OverflowError:
        return None
