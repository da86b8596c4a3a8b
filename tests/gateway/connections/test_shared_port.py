"""Gateways in processes of their own: several on one port, and one without file descriptors."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import AddressInUse
from alignedserve.gateway.server import bind
from tests.gateway.connections import shared_port_gateway

NUM_GATEWAYS = 3
NUM_STREAMS = 24


def test_a_port_is_shared_by_those_that_say_so_alone() -> None:
    with bind("127.0.0.1", 0, is_shared=True) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port, is_shared=True):
            pass
        with pytest.raises(AddressInUse):
            bind("127.0.0.1", port)
    assert GatewayConfig(port=65_535, count=4, shared_port=True).num_ports == 1


@asynccontextmanager
async def gateways(port: int, count: int = NUM_GATEWAYS, max_files: int = 1024) -> AsyncIterator[list[int]]:
    """Yield the ids of the processes of gateways that serve on this port."""
    command = [sys.executable, "-m", shared_port_gateway.__name__, str(port), "0.02"]
    limited = ["sh", "-c", f'ulimit -n {max_files}; exec "$@"', "sh", *command]
    pipe = asyncio.subprocess.PIPE
    started = [
        await asyncio.create_subprocess_exec(*limited, stdin=pipe, stdout=pipe, env=os.environ) for _ in range(count)
    ]
    try:
        async with asyncio.timeout(120):
            yield [int(await process.stdout.readline()) for process in started if process.stdout is not None]
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.mark.slow
async def test_a_killed_gateway_costs_its_own_connections_alone(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    num_first = 0
    all_have_begun = asyncio.Event()

    async def stream() -> int:
        """Return how many events came; a lost connection ends them early."""
        nonlocal num_first
        num_events = 0
        body = {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 200, "ignore_eos": True}
        try:
            async with (
                httpx.AsyncClient(timeout=120) as client,
                client.stream("POST", f"{url}/v1/completions", json=body) as answer,
            ):
                async for line in answer.aiter_lines():
                    num_first += line.startswith("data: ") and num_events == 0
                    num_events += line.startswith("data: ")
                    if num_first == NUM_STREAMS:
                        all_have_begun.set()
        except httpx.HTTPError:
            pass
        return num_events

    async with gateways(unused_tcp_port) as processes:
        streams = [asyncio.create_task(stream()) for _ in range(NUM_STREAMS)]
        await all_have_begun.wait()
        whole = [asyncio.create_task(ask(url)) for _ in range(NUM_STREAMS)]
        os.kill(processes[0], signal.SIGKILL)
        after = [asyncio.create_task(ask(url)) for _ in range(NUM_STREAMS)]
        num_events = await asyncio.gather(*streams)
        num_lost = sum(num < max(num_events) for num in num_events)
        assert 0 < num_lost < NUM_STREAMS
        assert await asyncio.gather(*whole, *after) == [200] * 2 * NUM_STREAMS


@pytest.mark.slow
async def test_a_gateway_without_file_descriptors_refuses_connections_until_others_end(unused_tcp_port: int) -> None:
    port = unused_tcp_port
    async with gateways(port, count=1, max_files=120):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        refused = await asyncio.wait_for(held[-1][0].read(), 60)
        assert refused.startswith(b"HTTP/1.1 503 ")
        for _, writer in held:
            writer.close()
        status = 0
        async with httpx.AsyncClient() as client, asyncio.timeout(60):
            while status != 200:
                with contextlib.suppress(httpx.HTTPError):
                    status = (await client.get(f"http://127.0.0.1:{port}/health")).status_code


async def ask(url: str) -> int:
    """Return how many tokens a whole answer has, asked for as OpenAI's SDK does: again after a lost connection."""
    import openai

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
        answer = await client.completions.create(
            model="tiny", prompt="a", max_tokens=200, extra_body={"ignore_eos": True}
        )
    assert answer.usage is not None
    return answer.usage.completion_tokens
