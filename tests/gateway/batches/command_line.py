"""`alignedserve batch` run against a gateway of this process, on a real port."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cli.main import main
from tests.gateway.batches.batch_server import listening
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway


class CommandLine:
    """Runs commands while the gateway goes on in this event loop."""

    def __init__(self, served: BatchGateway, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.served = served
        self.url = url
        self.out = self.err = ""
        self._capsys = capsys

    async def run(self, *arguments: str, url: str | None = None) -> int:
        """Run a command and return its exit code; `out` and `err` are of it."""
        sys.argv = ["alignedserve", "batch", *arguments, "--url", url or self.url]
        code = await asyncio.to_thread(_exit_code)
        self.out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.err
        return code

    async def json(self, *arguments: str) -> Any:
        assert await self.run(*arguments, "--json") == 0, self.err
        return json.loads(self.out)


def _exit_code() -> int:
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    raise AssertionError("a command ends with a code")


@asynccontextmanager
async def command_line(
    folder: Path, capsys: pytest.CaptureFixture[str], *args: Any, **fields: Any
) -> AsyncIterator[CommandLine]:
    async with batch_gateway(folder / "state", *args, **fields) as served, listening(served.app) as url:
        yield CommandLine(served, url, capsys)
