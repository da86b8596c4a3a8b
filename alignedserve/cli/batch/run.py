"""`alignedserve batch run`: every row of a table through one prompt, as batches.

1. The table is read once: a mistake in it is reported before anything is sent.
2. Rows become lines of a batch, `custom_id` is the row's number. A file over the server's limits becomes several
   batches, one after another.
3. The batch's id goes into OUTPUT.run, then the command waits. Killed, the same command finds the batch again.
4. Records of all batches go into a temporary file of SQLite by row, so that no order and no repetition matters.
5. OUTPUT gets one row for each row of the table, in the table's order, whole or not at all. OUTPUT.run is removed once
   no row waits for an answer."""

import asyncio
import hashlib
import os
import re
import secrets
import sqlite3
import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import msgspec
import orjson
from rich.console import Console

from alignedserve.batches.records import Endpoint
from alignedserve.cli.batch.app import RunOptions
from alignedserve.cli.batch.client import (
    PATIENCE_S,
    BatchClient,
    DownloadReceiver,
    RequestRefused,
    byte_bar,
    checked_id,
    run_with_client,
    watch_until_over,
)
from alignedserve.cli.batch.commands import ResultTail, delete_second_copy, error_text, print_problems, require_window
from alignedserve.cli.batch.formatting import OVER
from alignedserve.cli.batch.input_check import FileLimits
from alignedserve.cli.batch.tables import (
    Kinds,
    Row,
    RowTable,
    checked_suffix,
    json_lines,
    open_table,
    parsed,
    text_of,
    write_table,
)
from alignedserve.cli.console import FAILURE, counted, printable, require_writable
from alignedserve.core.errors import ConfigError, InvalidRequest
from alignedserve.disk.durable import lock_file, publish
from alignedserve.runtime.grammar.json_schema import normalize_schema

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_TYPES = ("string", "integer", "number", "boolean")
_NOT_FOUND = 404
_HEAD = b'{"run_id":"'
_MAX_SHOWN_COLUMNS = 20
_CUT = "cut by --max-tokens or the end of the context"
_NO_ANSWER = b'{"error":{"code":"not_sent","message":"no batch has answered this row"}}'


class RowPrompt:
    """A text with columns in braces; two braces stand for one."""

    def __init__(self, option: str, text: str, table: RowTable) -> None:
        if text != text.encode(errors="replace").decode():
            raise ConfigError(f"{option}: is not text in UTF-8")
        self._text = text
        self.columns = []
        for piece in _PIECE.finditer(text):
            if piece[0] in ("{", "}"):
                raise ConfigError(f"{option}: a single {piece[0]}; write {piece[0] * 2} for a brace in the text")
            if piece[1] is not None:
                hint = "; write {{ and }} for braces in the text"
                require_columns(option, [piece[1]], table, hint)
                self.columns.append(piece[1])

    def fill(self, row: Row) -> str:
        return _PIECE.sub(lambda piece: piece[0][0] if piece[1] is None else text_of(row[piece[1]]), self._text)


def require_columns(option: str, names: list[str], table: RowTable, hint: str = "") -> None:
    for name in names:
        if name not in table.columns:
            raise ConfigError(f"{option}: no column {name!r} in the table; it has {shown_columns(table)}{hint}")


def shown_columns(table: RowTable) -> str:
    names = list(table.columns)
    more = ", …" if len(names) > _MAX_SHOWN_COLUMNS else ""
    return printable(", ".join(names[:_MAX_SHOWN_COLUMNS])) + more


class RowQuestions:
    """The prompts of the table's rows, and the columns that their answers become."""

    def __init__(self, options: RunOptions, table: RowTable) -> None:
        self._prompt = RowPrompt("--prompt", options.prompt, table)
        self._system = None if options.system is None else RowPrompt("--system", options.system, table)
        if not self._prompt.columns:
            raise ConfigError(f"--prompt: names no column; the table has {shown_columns(table)}")
        self.columns = self._prompt.columns + (self._system.columns if self._system else [])
        self.schema = None if options.schema is None else _schema(options.schema)
        self._fields = {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "response_format": self.schema
            and {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.schema}},
        }

    @property
    def kinds(self) -> Kinds:
        """Return the columns of a result."""
        properties = {name: _kind(of) for name, of in (self.schema or {}).get("properties", {}).items()}
        return {"answer": "string", **properties, "finish_reason": "string", "error": "string"}

    def missing(self, row: Row) -> str | None:
        """Return why a row cannot be asked about."""
        return next((f"column {name} is empty" for name in self.columns if not text_of(row[name]).strip()), None)

    def line(self, number: int, row: Row, model: str) -> bytes:
        messages = [{"role": "user", "content": self._prompt.fill(row)}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.fill(row)})
        fields = {name: value for name, value in self._fields.items() if value is not None}
        body = {"model": model, "messages": messages, **fields}
        line = {"custom_id": str(number), "method": "POST", "url": Endpoint.CHAT.value, "body": body}
        return orjson.dumps(line) + b"\n"

    def result(self, record: bytes) -> Row:
        """Return the result's columns from the record of a row."""
        columns: dict[str, Any] = dict.fromkeys(self.kinds)
        try:
            document = parsed(record.decode())
            if not document.get("response") or document["response"]["status_code"] != 200:
                return columns | {"error": error_text(document)}
            (choice,) = document["response"]["body"]["choices"]
            columns |= {"answer": choice["message"]["content"], "finish_reason": choice["finish_reason"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return columns | {"error": f"the server's record is not understood: {type(error).__name__}"}
        return columns | self._properties(columns)

    def _properties(self, columns: Row) -> dict[str, Any]:
        if self.schema is None:
            return {}
        try:
            value = parsed(columns["answer"])
        except (ValueError, TypeError, RecursionError):
            is_cut = columns["finish_reason"] == "length"
            return {"error": f"the answer was {_CUT}" if is_cut else "the answer is not JSON"}
        names = self.schema.get("properties", {}) if isinstance(value, dict) else {}
        return {name: value.get(name) for name in names}


def _kind(of: Any) -> str:
    kinds = of.get("type") if isinstance(of, dict) else None
    named = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "null"]
    return named[0] if len(named) == 1 and named[0] in _TYPES else "json"


def _schema(path: Path) -> dict[str, Any]:
    try:
        schema = orjson.loads(path.read_bytes().removeprefix(BOM_UTF8))
        normalize_schema(schema)
    except InvalidRequest as error:
        raise ConfigError(f"--schema {path}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--schema {path}: is not a file of JSON") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"--schema {path}: is not a JSON object")
    for name in ("answer", "finish_reason", "error"):
        if name in schema.get("properties", {}):
            raise ConfigError(f"--schema {path}: the property {name!r} would be the name of two columns")
    return schema


class RowRecords:
    """Records of rows by number, on disk until the process ends; a later record of a row replaces an earlier one. Whole
    lines of result files are written into it."""

    def __init__(self) -> None:
        self._store = sqlite3.connect("", isolation_level=None)  # a temporary file
        self._store.execute("CREATE TABLE records (number INTEGER PRIMARY KEY, is_final INTEGER, record BLOB)")

    def write(self, whole_lines: bytes, /) -> int:
        for line in whole_lines.splitlines():
            with suppress(msgspec.DecodeError, KeyError, TypeError, ValueError):  # the row stays without an answer
                record = msgspec.json.decode(line)
                self.add(int(record["custom_id"]), line, is_final=record.get("response") is not None)
        return len(whole_lines)

    def flush(self) -> None:
        """Nothing survives the process."""

    def truncate(self) -> int:
        return 0

    def add(self, number: int, record: bytes, *, is_final: bool) -> None:
        self._store.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (number, is_final, record))

    def close(self) -> None:
        self._store.close()

    def is_final(self, number: int) -> bool:
        return self._of(number)[0]

    def record(self, number: int) -> bytes:
        return self._of(number)[1]

    def _of(self, number: int) -> tuple[bool, bytes]:
        stored = self._store.execute("SELECT is_final, record FROM records WHERE number = ?", (number,)).fetchone()
        return (False, _NO_ANSWER) if stored is None else (bool(stored[0]), stored[1])


class RunFile:
    """The settings of an unfinished run and, line by line, the ids of its batches."""

    def __init__(self, file: BinaryIO, path: Path, settings: dict[str, Any]) -> None:
        self._file, self._path = file, path
        first, *lines = file.read().split(b"\n")
        try:
            known: dict[str, Any] = orjson.loads(first) if lines else {"run_id": "", "settings": {}}
            self.run_id, earlier = str(known["run_id"]), dict(known["settings"])
            self.batches = [checked_id(line.decode()) for line in lines[:-1]]
            if not lines and not _HEAD.startswith(first[: len(_HEAD)]):
                raise ValueError("not the beginning of a line of ours")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--output: {path} is not of a run; remove it") from error
        others = [name for name, value in settings.items() if earlier.get(name) != value]
        if others and self.batches:
            raise ConfigError(
                f"{path} is of an unfinished run with another {', '.join(others)}: repeat its command, or remove it "
                "to begin anew"
            )
        file.truncate(0 if others else file.seek(-len(lines[-1]), os.SEEK_END))  # nothing was sent; half a line
        file.seek(0, os.SEEK_END)
        if others:
            self.run_id = secrets.token_hex(16)
            self._append(orjson.dumps({"run_id": self.run_id, "settings": settings}))

    def add(self, batch_id: str) -> None:
        self._append(batch_id.encode())
        self.batches.append(batch_id)

    def _append(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


@contextmanager
def opened_run(path: Path, settings: dict[str, Any]) -> Iterator[RunFile]:
    """Open and lock the file of a run. Raises ConfigError."""
    try:
        descriptor = lock_file(path)
    except OSError as error:
        raise ConfigError(f"--output: {path} cannot be written: {error.strerror}") from error
    if descriptor is None:
        raise ConfigError(f"--output: another run holds {path}")
    with os.fdopen(descriptor, "r+b") as file:
        yield RunFile(file, path, settings)


def write_parts(lines: Iterator[bytes], path: Path, limits: FileLimits) -> Iterator[int]:
    """Write lines into a file; yield their number whenever the file is full, and begin it anew."""
    line = next(lines, None)
    while line is not None:
        num_lines = num_bytes = 0
        with path.open("wb") as file:
            while line is not None and num_lines < limits.max_lines and num_bytes + len(line) <= limits.max_file_bytes:
                file.write(line)
                num_lines, num_bytes = num_lines + 1, num_bytes + len(line)
                line = next(lines, None)
        yield num_lines


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run_table(options: RunOptions) -> int:
    """Exit code 0 if every row has an answer, 1 if some rows have an error."""
    return run_with_client(options.url, TableRun(options).act, PATIENCE_S)


class TableRun:
    """One command, from the table to the output."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        if options.output is None and options.limit is None:
            raise ConfigError("--output: name a file; only a try with --limit is printed")
        self._run_path: Path | None = None
        if options.output is not None:
            checked_suffix("--output", options.output)
            self._run_path = options.output.with_name(f"{options.output.name}.run")
            if options.output.exists() and not self._run_path.exists():
                raise ConfigError(f"--output {options.output}: is there already; remove it, or name another file")
            require_writable(options.output)
        require_window(options.window)
        self._table = open_table(options.path, options.limit)
        self._questions = RowQuestions(options, self._table)
        chosen = self._table.columns if options.columns is None else options.columns.split(",")
        self._columns = list(dict.fromkeys(chosen)) if options.columns != "" else []
        require_columns("--columns", self._columns, self._table)
        for name in self._columns:
            if name in self._questions.kinds:
                raise ConfigError(f"the table has a column {name!r} already: name the columns to keep by --columns")
        self._digest = _digest_of(options.path)
        self._num_rows = sum(1 for _ in self._table.rows(self._questions.columns))

    async def act(self, client: BatchClient, console: Console) -> int:
        options, models = self._options, await client.models()
        model = options.model or next(iter(models), "")
        if not models:
            raise ConfigError(f"{client.url} lists no model for this key")
        if model not in models:
            raise ConfigError(f"--model {model}: not served at {client.url}, which has {', '.join(models)}")
        settings = {
            "table": self._digest,
            "--prompt": options.prompt,
            "--system": options.system,
            "--schema": self._questions.schema,
            "--model": model,
            "--max-tokens": options.max_tokens,
            "--temperature": options.temperature,
            "--limit": options.limit,
        }
        with TemporaryDirectory(prefix="alignedserve-") as name, closing(RowRecords()) as self._records:
            folder = Path(name)
            with opened_run(self._run_path or folder / "run", settings) as run_file:
                await self._answer(client, console, run_file, model, folder)
                return self._write(console, run_file)

    async def _answer(self, client: BatchClient, console: Console, run_file: RunFile, model: str, folder: Path) -> None:
        for batch_id in list(run_file.batches):
            if not await self._collect(client, console, batch_id):
                return
        limits = await client.limits()
        path = folder / f"{self._options.path.stem}.jsonl"
        for _ in write_parts(self._lines(model, limits), path, limits):
            with byte_bar(console, "sending", path.stat().st_size) as update:
                file = await client.upload(path, update)
            body = {
                "endpoint": Endpoint.CHAT.value,
                "completion_window": self._options.window,
                "input_file_id": file["id"],
            }
            batch = await client.create(body, self._key(run_file, path))
            await delete_second_copy(client, batch, str(file["id"]), console)
            run_file.add(checked_id(str(batch["id"])))
            if not await self._collect(client, console, str(batch["id"])):
                return

    def _key(self, run_file: RunFile, path: Path) -> str:
        """Return an Idempotency-Key, the same one if the command is killed before it knows the batch's id."""
        return f"run-{run_file.run_id}-{len(run_file.batches)}-{self._options.window}-{_digest_of(path)}"

    async def _collect(self, client: BatchClient, console: Console, batch_id: str) -> bool:
        """Wait for a batch and take its records. Return False if it ends badly meanwhile: then send no more."""
        try:
            batch = await client.batch(batch_id)
            was_over = batch["status"] in OVER
            if not was_over:
                batch = await watch_until_over(client, batch_id, console)
            for kind in ("error_file_id", "output_file_id"):
                if batch.get(kind):
                    tail = ResultTail(self._records)
                    await client.receive(str(batch[kind]), DownloadReceiver(tail.offset, tail.take, tail.begin))
        except RequestRefused as error:
            if error.status != _NOT_FOUND:
                raise
            console.print(f"{client.url} does not know {batch_id}: its rows are sent again", soft_wrap=True)
            return True
        except asyncio.CancelledError:
            if self._run_path is not None:
                console.print("the same command continues here", soft_wrap=True)
            raise
        print_problems(batch, console)
        return was_over or batch["status"] == "completed"

    def _lines(self, model: str, limits: FileLimits) -> Iterator[bytes]:
        """Yield the lines of rows without an answer; note rows that cannot be sent."""
        for number, row in enumerate(self._table.rows(self._questions.columns), start=1):
            if self._records.is_final(number):
                continue
            problem, line = self._questions.missing(row), b""
            if problem is None:
                line = self._questions.line(number, row, model)
                if len(line) > min(limits.max_line_bytes, limits.max_file_bytes):
                    problem = f"longer than a line of {limits.max_line_bytes} bytes"
            if problem is None:
                yield line
            else:
                record = {"error": {"code": "invalid_row", "message": problem}}
                self._records.add(number, orjson.dumps(record), is_final=True)

    # --- output

    def _write(self, console: Console, run_file: RunFile) -> int:
        output, counts = self._options.output, Counter[str]()
        if output is None:
            sys.stdout.writelines(json_lines(self._table, self._columns, self._results(counts)))
        else:
            if _digest_of(self._options.path) != self._digest:
                raise ConfigError(f"{self._options.path} has changed meanwhile: put it back, and repeat the command")
            self._publish(output, counts)
        shown = [counted(self._num_rows, "row"), f"{counts['errors']} with an error" if counts["errors"] else ""]
        shown += [f"{counts['cut']} {_CUT}" if counts["cut"] else ""]
        console.print(", ".join(filter(None, shown)), markup=False)
        if counts["unanswered"]:
            waiting = counted(counts["unanswered"], "row")
            console.print(f"{waiting} without an answer: the same command sends them again", soft_wrap=True)
        else:
            run_file.remove()
        return FAILURE if counts["errors"] else 0

    def _publish(self, output: Path, counts: Counter[str]) -> None:
        partial = output.with_name(f".{output.name}.part{output.suffix}")
        try:
            write_table(partial, self._table, self._columns, self._results(counts), self._questions.kinds)
            with partial.open("rb") as file:
                publish(file.fileno(), partial, output)
        except OSError as error:
            raise ConfigError(f"--output {output}: cannot be written: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)

    def _results(self, counts: Counter[str]) -> Iterator[Row]:
        for number in range(1, self._num_rows + 1):
            result = self._questions.result(self._records.record(number))
            counts["errors"] += result["error"] is not None
            counts["cut"] += result["finish_reason"] == "length"
            counts["unanswered"] += not self._records.is_final(number)
            yield result
