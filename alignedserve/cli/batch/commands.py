"""`alignedserve batch`: best-effort files through any gateway. Results go to stdout, all else to stderr.

Exit codes: 0; 1 where a batch failed, expired or was cancelled, or the server says no; 2 for the command line.
"""

import asyncio
import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from alignedserve.batches.records import Endpoint
from alignedserve.cli.batch.client import PATIENCE_S, BatchClient, RequestRefused
from alignedserve.cli.batch.formatting import OVER, clock, num_ended, num_lines, outlook, summary
from alignedserve.cli.batch.input_check import Checked, FileLimits, as_text, check_file, endpoint_of_first_line
from alignedserve.cli.batch.watch import ByteBar, view_of
from alignedserve.cli.batch.watch import watch as watch_until_over
from alignedserve.cli.console import FAILURE, notes, print_error, printable, results
from alignedserve.config.environment import client_api_key
from alignedserve.core.errors import ConfigError, InvalidRequest
from alignedserve.gateway.files.schemas import CreateBatchRequest, window_s
from alignedserve.gateway.openai.parsing import parse

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)
_SHORT_PATIENCE_S = 30.0  # of commands that are over at once
_SHORT_NAMES = {"chat": Endpoint.CHAT, "completions": Endpoint.COMPLETION}
_MAX_SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What the command line says."""

    url: str
    path: Path
    window: str
    endpoint: str | None
    metadata: tuple[str, ...]
    idempotency_key: str | None
    is_checked: bool
    is_watched: bool
    json_output: bool


def run_with_client(
    url: str, act: Callable[[BatchClient, Console], Awaitable[int]], patience_s: float = _SHORT_PATIENCE_S
) -> int:
    """Do something with a client; its exit code."""
    console = notes()

    def say(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {printable(text)}", markup=False, soft_wrap=True)

    async def run() -> int:
        async with BatchClient(url=url, api_key=client_api_key(), say=say, patience_s=patience_s) as client:
            return await act(client, console)

    return asyncio.run(run())


def submit(options: SubmitOptions) -> int:
    """Check, upload, create; then watch, if asked to."""
    body, num_bytes = _body(options), options.path.stat().st_size

    async def act(client: BatchClient, console: Console) -> int:
        if options.is_checked and not await _is_fine(client, options.path, Endpoint(body["endpoint"]), console):
            return FAILURE
        with ByteBar(console, "sending", num_bytes) as bar:
            file = await client.upload(options.path, bar.note)
        batch = await client.create(
            body | {"input_file_id": file["id"]}, options.idempotency_key or f"cli-{uuid.uuid4().hex}"
        )
        await _forget_a_second_copy(client, batch, str(file["id"]), console)
        if not options.is_watched:
            return _print_created(batch, console, options.json_output)
        console.print(f"{batch['id']}", markup=False)
        return await _watch(client, batch["id"], console, options.json_output)

    return run_with_client(options.url, act, PATIENCE_S)


def status(url: str, batch_id: str, json_output: bool) -> int:
    """A batch as it is now."""

    async def act(client: BatchClient, console: Console) -> int:
        batch = await client.batch(checked_id(batch_id))
        _print_batch(batch, json_output)
        return exit_code_of(batch)

    return run_with_client(url, act)


def watch(url: str, batch_id: str, json_output: bool) -> int:
    """Show a batch until it is over."""

    async def act(client: BatchClient, console: Console) -> int:
        return await _watch(client, checked_id(batch_id), console, json_output)

    return run_with_client(url, act, PATIENCE_S)


def cancel(url: str, batch_id: str, json_output: bool) -> int:
    """End a batch. Repeating it is fine."""

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


def show_list(url: str, limit: int, json_output: bool) -> int:
    """The newest batches."""

    async def act(client: BatchClient, console: Console) -> int:
        batches = await client.batches(limit)
        if json_output:
            print_json(batches)
        else:
            results().print(_table(batches))
        return 0

    return run_with_client(url, act)


def checked_id(text: str) -> str:
    """An id as it may stand in an address. Raises ConfigError."""
    if not _ID.fullmatch(text):
        raise ConfigError(f"{printable(text)!r} is no batch's id; `alignedserve batch list` shows them")
    return text


def exit_code_of(batch: dict[str, Any]) -> int:
    """1 for a batch that ended otherwise than completed."""
    return FAILURE if batch["status"] in OVER and batch["status"] != "completed" else 0


def print_json(answer: object) -> None:
    """For scripts."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer)).decode() + "\n")
    sys.stdout.flush()


# --- submit


def _body(options: SubmitOptions) -> dict[str, Any]:
    """What creates the batch, checked as the gateway checks it. Raises ConfigError."""
    body: dict[str, Any] = {"endpoint": _endpoint(options).value, "completion_window": options.window}
    if options.metadata:
        body["metadata"] = dict(_pair(text) for text in options.metadata)
    if options.idempotency_key is not None and not 0 < len(options.idempotency_key.encode()) <= 255:
        raise ConfigError("--idempotency-key: must have 1 to 255 characters")
    try:
        window_s(parse(CreateBatchRequest, body | {"input_file_id": "file"}).completion_window)
    except InvalidRequest as error:
        raise ConfigError(f"{error.param}: {error}") from error
    return body


def _endpoint(options: SubmitOptions) -> Endpoint:
    given = options.endpoint
    if given is None:
        return endpoint_of_first_line(options.path)
    known = _SHORT_NAMES | {endpoint.value: endpoint for endpoint in Endpoint}
    if given not in known:
        raise ConfigError(f"--endpoint {given}: must be one of {', '.join(known)}")
    return known[given]


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"--metadata {text}: must be NAME=VALUE")
    return name, value


async def _is_fine(client: BatchClient, path: Path, endpoint: Endpoint, console: Console) -> bool:
    """Whether the file can be run there. Says what is wrong with it."""
    models, limits = await client.models(), await client.limits()
    checked = await asyncio.to_thread(_checked, path, endpoint, models, limits, console)
    for problem in checked.problems[:_MAX_SHOWN_PROBLEMS]:
        console.print(f"{path.name}: {printable(as_text(problem))}", markup=False, soft_wrap=True)
    num_hidden = len(checked.problems) - _MAX_SHOWN_PROBLEMS
    if num_hidden > 0:
        console.print(f"and {num_hidden} more", markup=False)
    if checked.problems:
        print_error(f"{path} was not sent: {len(checked.problems)} problems")
    return not checked.problems


def _checked(path: Path, endpoint: Endpoint, models: tuple[str, ...], limits: FileLimits, console: Console) -> Checked:
    with ByteBar(console, "checking", path.stat().st_size) as bar:
        return check_file(path, endpoint, models, bar.note, limits=limits)


async def _forget_a_second_copy(client: BatchClient, batch: dict[str, Any], file_id: str, console: Console) -> None:
    """An Idempotency-Key that was used before gives the batch of then, which has a copy of this file already."""
    if batch["input_file_id"] != file_id:
        console.print(f"{batch['id']} was created with this idempotency key before", markup=False)
        await client.delete_file(file_id)


def _print_created(batch: dict[str, Any], console: Console, json_output: bool) -> int:
    if json_output:
        print_json(batch)
        return 0
    sys.stdout.write(f"{batch['id']}\n")
    sys.stdout.flush()
    words = outlook(batch, time.time())
    console.print(f"{batch['status']}{': ' + words if words else ''}", markup=False, soft_wrap=True)
    return 0


# --- what is shown


async def _watch(client: BatchClient, batch_id: str, console: Console, json_output: bool) -> int:
    with view_of(console) as view:
        batch = await watch_until_over(client, batch_id, view)
    _print_batch(batch, json_output)
    return exit_code_of(batch)


def _print_batch(batch: dict[str, Any], json_output: bool) -> None:
    if json_output:
        print_json(batch)
        return
    console = results()
    console.print(summary(batch, time.time()), markup=False)
    problems = (batch.get("errors") or {}).get("data") or []
    for problem in problems[:_MAX_SHOWN_PROBLEMS]:
        console.print(problem_text(problem), markup=False, soft_wrap=True)
    if len(problems) > _MAX_SHOWN_PROBLEMS:
        console.print(f"and {len(problems) - _MAX_SHOWN_PROBLEMS} more; see `alignedserve batch errors`", markup=False)


def problem_text(problem: dict[str, Any]) -> str:
    """A validation error as it is shown."""
    place = f"line {problem['line']}: " if problem.get("line") is not None else ""
    return printable(f"{place}{problem.get('message')} ({problem.get('code')})")


def _table(batches: list[dict[str, Any]]) -> Table:
    table = Table(header_style="bold")
    for heading in ("batch", "status", "lines", "failed", "created", "window", "outlook"):
        table.add_column(heading, justify="right" if heading in ("lines", "failed") else "left", no_wrap=True)
    for batch in batches:
        counts = batch.get("request_counts") or {}
        table.add_row(
            str(batch["id"]),
            str(batch["status"]),
            f"{num_ended(batch)}/{num_lines(batch)}" if num_lines(batch) else "",
            str(counts.get("failed") or ""),
            clock(batch["created_at"]),
            str(batch["completion_window"]),
            outlook(batch, time.time()).partition(",")[0],
        )
    return table
