"""Commands of `alignedserve batch` on whole batches. Results go to stdout, all else to stderr.

Exit codes: 0; 1 if a batch failed, expired or was cancelled, or the server refused the request; 2 for a wrong command.
"""

import asyncio
import re
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from alignedserve.api.openai.parsing import parse
from alignedserve.batches.hours import check_window
from alignedserve.batches.records import Endpoint
from alignedserve.cli.batch.app import SubmitOptions
from alignedserve.cli.batch.client import (
    PATIENCE_S,
    BatchClient,
    RequestRefused,
    byte_bar,
    checked_id,
    exit_code_of,
    print_json,
    run_with_client,
    watch_until_over,
)
from alignedserve.cli.batch.formatting import batches_table, outlook, problem_text, summary
from alignedserve.cli.batch.input_check import Checked, FileLimits, check_file, endpoint_of_first_line
from alignedserve.cli.console import FAILURE, print_error, print_table, results
from alignedserve.core.errors import ConfigError, InvalidRequest
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
