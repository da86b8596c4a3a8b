"""A proxy in the environment is never asked for a server of ours."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import yaml

from alignedserve.cli.batch.client import BatchClient
from alignedserve.cli.commands.top import _get
from alignedserve.client.openai_client import OpenAiClient
from alignedserve.cluster.starting import ask_ready
from tests.support.marks import each

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
COMPOSE = yaml.safe_load((Path(__file__).parents[3] / "compose.yaml").read_text())


async def _start(url: str) -> None:
    assert await asyncio.to_thread(ask_ready, url) is None


async def _top(url: str) -> None:
    assert (await asyncio.to_thread(_get, url))[0] == 200


async def _batches(url: str) -> None:
    async with BatchClient(url=url, api_key=None, say=print, patience_s=0.0) as client:
        assert await client.models() == ("model",)


async def _chat(url: str) -> None:
    async with OpenAiClient(url=url) as client:
        assert await client.model_name() == "model"


async def _container(url: str) -> None:
    program = COMPOSE["services"]["alignedserve"]["healthcheck"]["test"][-1].replace("http://127.0.0.1:8000", url)
    await asyncio.to_thread(exec, program, {})


@each("asks", [_start, _top, _batches, _chat, _container])
async def test_a_dead_proxy_is_not_asked(
    asks: Callable[[str], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"object": "list", "data": [{"id": "model", "object": "model"}]}).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
        writer.close()

    for name in (*VARIABLES, *map(str.lower, VARIABLES)):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_tcp_port}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        await asks(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
