"""Running one command against a server: client, messages on stderr, JSON on stdout, exit codes."""

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from rich.console import Console

from alignedserve.cli.batch.client import BatchClient
from alignedserve.cli.batch.formatting import OVER
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
