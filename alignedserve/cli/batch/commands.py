"""Commands of `alignedserve batch` on whole batches. Results go to stdout, all else to stderr.

Exit codes: 0; 1 if a batch failed, expired or was cancelled, or the server refused the request; 2 for a wrong command.

Commands `alignedserve batch results` and `errors`: a batch's two result files, whole or as they grow.
"""

import asyncio
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
from rich.console import Console

from alignedserve.api.openai.parsing import parse
from alignedserve.batches.hours import check_window
from alignedserve.batches.records import Endpoint
from alignedserve.cli.batch.app import SubmitOptions
from alignedserve.cli.batch.client import (
    PATIENCE_S,
    POLL_S,
    BatchClient,
    DownloadReceiver,
    RequestRefused,
    byte_bar,
    checked_id,
    exit_code_of,
    print_json,
    run_with_client,
    watch_until_over,
)
from alignedserve.cli.batch.formatting import OVER, batches_table, num_ended, outlook, problem_text, summary
from alignedserve.cli.batch.input_check import Checked, FileLimits, check_file, endpoint_of_first_line
from alignedserve.cli.console import FAILURE, discard_output, print_error, print_table, printable, results
from alignedserve.core.errors import AlignedServeError, ConfigError, InvalidRequest, PeerError
from alignedserve.gateway.files.schemas import CreateBatchRequest, schedule_asked, window_s

_SHORT_NAMES = {
    "chat": Endpoint.CHAT,
    "completions": Endpoint.COMPLETION,
    "responses": Endpoint.RESPONSES,
    "embeddings": Endpoint.EMBEDDINGS,
}
_MAX_SHOWN_PROBLEMS = 20


def submit(options: SubmitOptions) -> int:
    """Check and upload a file and create a batch from it; watch it if asked to."""
    body, num_bytes = _body(options), options.path.stat().st_size

    async def act(client: BatchClient, console: Console) -> int:
        if options.is_checked and not await _is_valid(client, options.path, Endpoint(body["endpoint"]), console):
            return FAILURE
        with byte_bar(console, "sending", num_bytes) as update:
            file = await client.upload(options.path, update)
        batch = await client.create(
            body | {"input_file_id": file["id"]}, options.idempotency_key or f"cli-{uuid.uuid4().hex}"
        )
        await delete_second_copy(client, batch, str(file["id"]), console)
        if not options.is_watched:
            return _print_created(batch, console, options.json_output)
        console.print(f"{batch['id']}", markup=False)
        return await _watch(client, batch["id"], console, options.json_output)

    return run_with_client(options.url, act, PATIENCE_S)


def status(url: str, batch_id: str, json_output: bool) -> int:
    async def act(client: BatchClient, console: Console) -> int:
        batch = await client.batch(checked_id(batch_id))
        _print_batch(batch, json_output)
        return exit_code_of(batch)

    return run_with_client(url, act)


def watch(url: str, batch_id: str, json_output: bool) -> int:
    async def act(client: BatchClient, console: Console) -> int:
        return await _watch(client, checked_id(batch_id), console, json_output)

    return run_with_client(url, act, PATIENCE_S)


def cancel(url: str, batch_id: str, json_output: bool) -> int:
    async def act(client: BatchClient, console: Console) -> int:
        try:
            batch = await client.cancel(checked_id(batch_id))
        except RequestRefused as error:
            if error.code != "batch_is_over":
                raise
            batch = await client.batch(batch_id)
            if batch["status"] != "cancelled":
                raise
        _print_batch(batch, json_output)
        return 0

    return run_with_client(url, act)


def pause(url: str, batch_id: str, json_output: bool, *, is_paused: bool) -> int:
    """Start no more lines of a batch, or start them again; may be repeated."""

    async def act(client: BatchClient, console: Console) -> int:
        _print_batch(await client.pause(checked_id(batch_id), is_paused=is_paused), json_output)
        return 0

    return run_with_client(url, act)


def show_list(url: str, limit: int, json_output: bool) -> int:
    async def act(client: BatchClient, console: Console) -> int:
        batches = await client.batches(limit)
        if json_output:
            print_json(batches)
        else:
            print_table(batches_table(batches, time.time()))
        return 0

    return run_with_client(url, act)


# --- submit


def _time(text: str | None) -> float | str | None:
    return float(text) if text is not None and re.fullmatch(r"\d{1,12}(\.\d{1,6})?", text, re.ASCII) else text


def _body(options: SubmitOptions) -> dict[str, Any]:
    body: dict[str, Any] = {"endpoint": _endpoint(options).value, "completion_window": options.window}
    fields = {"not_before": _time(options.not_before), "hours": options.hours, "priority": options.priority}
    body |= {name: value for name, value in fields.items() if value is not None}
    if options.metadata:
        body["metadata"] = dict(_pair(text) for text in options.metadata)
    if options.idempotency_key is not None and not 0 < len(options.idempotency_key.encode()) <= 255:
        raise ConfigError("--idempotency-key: must have 1 to 255 characters")
    try:
        request = parse(CreateBatchRequest, body | {"input_file_id": "file"})
        schedule, now = schedule_asked(request), time.time()
        check_window(schedule, now, now + window_s(request.completion_window))
    except InvalidRequest as error:
        raise ConfigError(_of_option(error)) from error
    return body


def require_window(text: str) -> None:
    """Raises ConfigError."""
    try:
        window_s(text)
    except InvalidRequest as error:
        raise ConfigError(_of_option(error)) from error


def _of_option(error: InvalidRequest) -> str:
    field = error.param or ""
    option = "--window" if field == "completion_window" else f"--{field.replace('_', '-')}"
    text = str(error)
    return option + text.removeprefix(field) if text.startswith(f"{field} ") else f"{option}: {text}"


def _endpoint(options: SubmitOptions) -> Endpoint:
    name = options.endpoint
    if name is None:
        return endpoint_of_first_line(options.path)
    known = _SHORT_NAMES | {endpoint.value: endpoint for endpoint in Endpoint}
    if name not in known:
        raise ConfigError(f"--endpoint {name}: must be one of {', '.join(known)}")
    return known[name]


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"--metadata {text}: must be NAME=VALUE")
    return name, value


async def _is_valid(client: BatchClient, path: Path, endpoint: Endpoint, console: Console) -> bool:
    models, limits = await client.models(), await client.limits()
    checked = await asyncio.to_thread(_checked, path, endpoint, models, limits, console)
    for problem in checked.problems[:_MAX_SHOWN_PROBLEMS]:
        console.print(f"{path.name}: {problem_text(msgspec.to_builtins(problem))}", markup=False, soft_wrap=True)
    num_hidden = len(checked.problems) - _MAX_SHOWN_PROBLEMS
    if num_hidden > 0:
        console.print(f"and {num_hidden} more", markup=False)
    if checked.problems:
        problems = "1 problem" if len(checked.problems) == 1 else f"{len(checked.problems)} problems"
        print_error(f"{path} was not sent: {problems}")
    return not checked.problems


def _checked(path: Path, endpoint: Endpoint, models: tuple[str, ...], limits: FileLimits, console: Console) -> Checked:
    with byte_bar(console, "checking", path.stat().st_size) as update:
        return check_file(path, endpoint, models, update, limits=limits)


async def delete_second_copy(client: BatchClient, batch: dict[str, Any], file_id: str, console: Console) -> None:
    if batch["input_file_id"] != file_id:
        console.print(f"{batch['id']} was created with this idempotency key before", markup=False)
        await client.delete_file(file_id)


def _print_created(batch: dict[str, Any], console: Console, json_output: bool) -> int:
    if json_output:
        print_json(batch)
        return 0
    sys.stdout.write(f"{batch['id']}\n")
    sys.stdout.flush()
    text = outlook(batch, time.time())
    console.print(f"{batch['status']}{': ' + text if text else ''}", markup=False, soft_wrap=True)
    return 0


# --- output


async def _watch(client: BatchClient, batch_id: str, console: Console, json_output: bool) -> int:
    batch = await watch_until_over(client, batch_id, console)
    _print_batch(batch, json_output)
    return exit_code_of(batch)


def _print_batch(batch: dict[str, Any], json_output: bool) -> None:
    if json_output:
        print_json(batch)
        return
    console = results()
    console.print(summary(batch, time.time()), markup=False)
    print_problems(batch, console)


def print_problems(batch: dict[str, Any], console: Console) -> None:
    problems = (batch.get("errors") or {}).get("data") or []
    for problem in problems[:_MAX_SHOWN_PROBLEMS]:
        console.print(problem_text(problem), markup=False, soft_wrap=True)
    if len(problems) > _MAX_SHOWN_PROBLEMS:
        console.print(f"and {len(problems) - _MAX_SHOWN_PROBLEMS} more; see `alignedserve batch errors`", markup=False)


_BLOCK_BYTES = 64 * 1024


class ResultsChanged(PeerError):
    """The server's file does not continue where ours ends."""


class NotWritten(AlignedServeError):
    """The disk is full, or the reader of our output has closed it."""


class Sink(Protocol):
    """Destination of whole lines: a file, or a printer."""

    def write(self, whole_lines: bytes, /) -> int:
        """Write whole lines."""

    def flush(self) -> None:
        """Flush buffers."""

    def truncate(self) -> int:
        """Remove everything behind the current position."""


class ResultTail:
    """Lines written so far, continued by the next download."""

    def __init__(self, sink: Sink, *, num_bytes: int = 0, last_line: bytes = b"") -> None:
        self._sink = sink  # positioned behind the last whole line; with `last_line`, half a line may follow there
        self.num_bytes = num_bytes  # written, in whole lines
        self.num_lines = 0  # written by this object
        self._last_line = last_line
        self._rest = b""
        self._is_joined = not last_line

    def offset(self) -> int:
        return self.num_bytes - len(self._last_line)

    def begin(self) -> None:
        """Begin a download: half a line left by an earlier one will be sent again."""
        self._rest, self._is_joined = b"", not self._last_line

    def take(self, chunk: bytes) -> None:
        """Write the whole lines of a chunk. Raises ResultsChanged, NotWritten."""
        self._rest += chunk
        if not self._is_joined and not self._join():
            return
        end = self._rest.rfind(b"\n") + 1
        if not end:
            return
        whole, self._rest = self._rest[:end], self._rest[end:]
        try:
            self._sink.write(whole)
            self._sink.flush()
        except OSError as error:
            raise NotWritten(f"results cannot be written: {error.strerror}") from error
        self.num_bytes += end
        self.num_lines += whole.count(b"\n")
        self._last_line = whole[whole.rfind(b"\n", 0, end - 1) + 1 :]

    def _join(self) -> bool:
        known = self._last_line
        if not known.startswith(self._rest[: len(known)]):
            raise ResultsChanged("the results do not continue where those that are here end")
        if len(self._rest) < len(known):
            return False
        self._rest, self._is_joined = self._rest[len(known) :], True
        if not self.num_lines:
            self._sink.truncate()
        return True


def open_tail(path: Path) -> tuple[ResultTail, BinaryIO]:
    """Continue the output of an earlier run, or create the file. A file with other content is not touched. Raises
    ConfigError."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")
        end, last_line = _last_whole_line(file)
        is_foreign = not end and file.seek(0, os.SEEK_END) > 0
        file.seek(end)
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
    if is_foreign:
        file.close()
        raise ConfigError(f"--output {path}: holds something other than results")
    return ResultTail(file, num_bytes=end, last_line=last_line), file


def _last_whole_line(file: BinaryIO) -> tuple[int, bytes]:
    start, tail = file.seek(0, os.SEEK_END), b""
    while start:
        length = min(_BLOCK_BYTES, start)
        start -= length
        file.seek(start)
        tail = file.read(length) + tail
        end = tail.rfind(b"\n") + 1
        before = tail.rfind(b"\n", 0, max(0, end - 1))
        if end and (before >= 0 or start == 0):
            return start + end, tail[before + 1 : end]
    return 0, b""


_SHARE = 10.0  # at most one part in this many of the time is spent downloading: the server reads its log each time
_LONGEST_PAUSE_S = 10.0
_RANGE_NOT_THERE = 416


def show_results(url: str, batch_id: str, *, is_followed: bool, output: Path | None) -> int:
    """Print or write the results so far; `is_followed`: until the batch is over."""

    async def act(client: BatchClient, console: Console) -> int:
        checked_id(batch_id)
        with _tail(output) as tail:
            batch = await _copy(client, batch_id, tail, is_followed=is_followed)
        if output is not None or is_followed:
            console.print(f"{tail.num_lines} lines; the batch is {batch['status']}", markup=False)
        elif not tail.num_lines:
            console.print(f"no results; the batch is {batch['status']}", markup=False)
        return exit_code_of(batch) if is_followed else 0

    return run_with_client(url, act, PATIENCE_S)


async def _copy(client: BatchClient, batch_id: str, tail: ResultTail, *, is_followed: bool) -> dict[str, Any]:
    began_s, num_copied = 0.0, -1

    def begin() -> None:
        nonlocal began_s
        began_s = time.monotonic()
        tail.begin()

    receiver = DownloadReceiver(offset=tail.offset, take=tail.take, begin=begin)
    while True:
        batch = await client.batch(batch_id)
        began_s = time.monotonic()
        if batch.get("output_file_id") and num_ended(batch) != num_copied:
            await _receive(client, batch["output_file_id"], receiver)
            num_copied = num_ended(batch)
        elif tail.num_bytes and not batch.get("output_file_id"):
            raise ResultsChanged("this batch has no results, but there are some here")
        if not is_followed or batch["status"] in OVER:
            return batch
        await asyncio.sleep(min(max(POLL_S, (time.monotonic() - began_s) * _SHARE), _LONGEST_PAUSE_S))


async def _receive(client: BatchClient, file_id: str, receiver: DownloadReceiver) -> None:
    try:
        await client.receive(file_id, receiver)
    except RequestRefused as error:
        if error.status != _RANGE_NOT_THERE:
            raise
        raise ResultsChanged("there are fewer results than are here") from error


@contextmanager
def _tail(output: Path | None) -> Iterator[ResultTail]:
    if output is None:
        try:
            yield ResultTail(sys.stdout.buffer)
        except NotWritten as error:
            discard_output()
            if isinstance(error.__cause__, BrokenPipeError):  # nobody reads on: no more to say
                raise error.__cause__ from None
            raise
        return
    tail, file = open_tail(output)
    with file:
        try:
            yield tail
        except NotWritten:
            with suppress(OSError):
                file.close()  # tries again to write what could not be written
            raise
        except ResultsChanged as error:
            if tail.num_lines:
                raise
            raise ConfigError(f"--output {output}: {error}; name another file") from error


def show_errors(url: str, batch_id: str, *, json_output: bool) -> int:
    async def act(client: BatchClient, console: Console) -> int:
        batch = await client.batch(checked_id(batch_id))
        problems = (batch.get("errors") or {}).get("data") or []
        for problem in problems:
            _print(msgspec.json.encode(problem).decode() if json_output else problem_text(problem))
        if batch.get("error_file_id"):
            printer = _LinePrinter(json_output)
            await client.receive(
                batch["error_file_id"], DownloadReceiver(printer.tail.offset, printer.tail.take, printer.tail.begin)
            )
        elif not problems:
            console.print(f"no errors; the batch is {batch['status']}", markup=False)
        return 0

    return run_with_client(url, act)


class _LinePrinter:
    def __init__(self, json_output: bool) -> None:
        self._json_output = json_output
        self.tail = ResultTail(self)

    def write(self, whole_lines: bytes, /) -> int:
        for line in whole_lines.splitlines():
            _print(line.decode() if self._json_output else _error_text(line))
        return len(whole_lines)

    def flush(self) -> None:
        sys.stdout.flush()

    def truncate(self) -> int:
        return 0


def error_text(result: dict[str, Any]) -> str:
    """Return why a line failed, from its record. Raises KeyError, TypeError, AttributeError."""
    response = result.get("response")
    error = response["body"]["error"] if response else result["error"]
    status = f"{response['status_code']} " if response else ""
    return f"{status}{error.get('code') or ''}: {error.get('message')}"


def _error_text(line: bytes) -> str:
    try:
        result = msgspec.json.decode(line)
        return printable(f"{result['custom_id']}: {error_text(result)}")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return printable(line.decode("utf-8", "replace"))


def _print(text: str) -> None:
    results().print(text, markup=False, soft_wrap=True)
