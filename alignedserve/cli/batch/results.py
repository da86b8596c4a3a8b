"""Commands `alignedserve batch results` and `errors`: a batch's two result files, whole or as they grow."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from alignedserve.cli.batch.client import PATIENCE_S, BatchClient, Receiver, RequestRefused
from alignedserve.cli.batch.formatting import OVER, num_ended, problem_text
from alignedserve.cli.batch.result_tail import NotWritten, ResultsChanged, ResultTail, open_tail
from alignedserve.cli.batch.session import checked_id, exit_code_of, run_with_client
from alignedserve.cli.batch.watch import POLL_S
from alignedserve.cli.console import printable, results
from alignedserve.cli.standard_streams import discard_output
from alignedserve.core.errors import ConfigError

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

    receiver = Receiver(offset=tail.offset, take=tail.take, begin=begin)
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


async def _receive(client: BatchClient, file_id: str, receiver: Receiver) -> None:
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
                batch["error_file_id"], Receiver(printer.tail.offset, printer.tail.take, printer.tail.begin)
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


def _error_text(line: bytes) -> str:
    try:
        result = msgspec.json.decode(line)
        response = result.get("response")
        error = response["body"]["error"] if response else result["error"]
        place = f"{response['status_code']} " if response else ""
        return printable(f"{result['custom_id']}: {place}{error.get('code') or ''}: {error.get('message')}")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return printable(line.decode("utf-8", "replace"))


def _print(text: str) -> None:
    results().print(text, markup=False, soft_wrap=True)
