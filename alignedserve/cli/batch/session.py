"""Running one command against a server: client, messages on stderr, JSON on stdout, exit codes."""

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from alignedserve.cli.batch.client import BatchClient
from alignedserve.cli.batch.formatting import OVER, Rate, num_ended, num_lines, progress_text
from alignedserve.cli.console import FAILURE, notes, printable
from alignedserve.config.environment import client_api_key
from alignedserve.core.errors import ConfigError

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)
_SHORT_PATIENCE_S = 30.0  # of commands that take one request


def run_with_client(
    url: str, act: Callable[[BatchClient, Console], Awaitable[int]], patience_s: float = _SHORT_PATIENCE_S
) -> int:
    console = notes()

    def say(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {printable(text)}", markup=False, soft_wrap=True)

    async def run() -> int:
        async with BatchClient(url=url, api_key=client_api_key(), say=say, patience_s=patience_s) as client:
            return await act(client, console)

    return asyncio.run(run())


def checked_id(text: str) -> str:
    """Return an id that may stand in a URL. Raises ConfigError."""
    if not _ID.fullmatch(text):
        raise ConfigError(f"{printable(text)!r} is not a batch id; `alignedserve batch list` shows them")
    return text


def exit_code_of(batch: dict[str, Any]) -> int:
    return FAILURE if batch["status"] in OVER and batch["status"] != "completed" else 0


def print_json(answer: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer)).decode() + "\n")
    sys.stdout.flush()


POLL_S = 1.0
_LINE_EVERY_S = 10.0  # without a terminal, unless the status changes


async def watch_until_over(client: BatchClient, batch_id: str, console: Console) -> dict[str, Any]:
    try:
        return await _watched(client, batch_id, console)
    except asyncio.CancelledError:
        console.print(f"{batch_id} goes on; `alignedserve batch cancel {batch_id}` ends it", soft_wrap=True)
        raise


async def _watched(client: BatchClient, batch_id: str, console: Console) -> dict[str, Any]:
    rate = Rate()
    with _bar(console) if console.is_terminal else _lines(console) as show:
        while True:
            batch = await client.batch(batch_id)
            rate.add(time.monotonic(), num_ended(batch))
            show(batch, progress_text(batch, rate, time.time()))
            if batch["status"] in OVER:
                return batch
            await asyncio.sleep(POLL_S)


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[dict[str, Any], str], None]]:
    columns = (
        TextColumn("[bold]{task.description}[/]"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn(  # a narrow terminal cuts this one
            "{task.fields[text]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        ),
    )
    bar = Progress(*columns, console=console, transient=True, refresh_per_second=4, expand=True)
    task = bar.add_task("", total=None, text="")

    def show(batch: dict[str, Any], text: str) -> None:
        total = num_lines(batch) or None
        bar.update(task, description=str(batch["status"]), completed=num_ended(batch), total=total, text=text)

    with bar:
        yield show


@contextmanager
def _lines(console: Console) -> Iterator[Callable[[dict[str, Any], str], None]]:
    last: tuple[str, int] | None = None
    printed_s = 0.0

    def show(batch: dict[str, Any], text: str) -> None:
        nonlocal last, printed_s
        now, seen = time.monotonic(), (str(batch["status"]), num_ended(batch))
        is_same_status = last is not None and last[0] == seen[0]
        if is_same_status and (seen == last or now - printed_s < _LINE_EVERY_S):
            return
        last, printed_s = seen, now
        count = f" {seen[1]}/{num_lines(batch)}" if num_lines(batch) else ""
        line = f"{time.strftime('%H:%M:%S')} {batch['id']} {seen[0]}{count}{', ' + text if text else ''}"
        console.print(line, markup=False, soft_wrap=True)

    yield show


@contextmanager
def byte_bar(console: Console, label: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show progress through a file, unless stderr is no terminal; yield a function that takes the bytes so far."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=num_bytes)
        yield lambda num_done: bar.update(task, completed=num_done)
