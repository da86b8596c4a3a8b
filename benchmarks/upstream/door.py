"""A door before a scripted OpenAI-compatible server, over real HTTP, each in a process of its own.

    python -m benchmarks.upstream.door                  # what the door costs: tokens a second, first token, memory
    python -m benchmarks.upstream.door --documents 64   # and chat beside documents, through the door and without it

The server is tests/harnesses/upstream_server.py: for the costs its tokens come at fixed steps; for documents it batches
continuously, and a step takes 15 ms, and 0.9 ms a token, as 125M OPT does on two cores, about.
"""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import free_port, wait_ready
from benchmarks.vllm.chat_beside_documents import SHOWN, Load

BODY = {"model": "model", "messages": [{"role": "user", "content": "hello"}], "stream": True}


@contextlib.contextmanager
def upstream(*options: str) -> Iterator[str]:
    """Run a scripted server; yield its address."""
    command = [sys.executable, "-m", "tests.harnesses.upstream_server", "--model", "model", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


@contextlib.contextmanager
def door(*urls: str, **settings: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run a door before these; yield its address and its process."""
    port, named = free_port(), [word for url in urls for word in ("--upstream", url)]
    named += [word for name, value in settings.items() for word in ("--set", f"gateway.{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "ALIGNEDSERVE_STATE_DIR": folder}
        command = [sys.executable, "-m", "alignedserve", "serve", *named, "--port", str(port)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            wait_ready(port, server)
            try:
                yield f"http://127.0.0.1:{port}", psutil.Process(server.pid)
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait(90)  # answers that run may end


async def streams(url: str, count: int, num_tokens: int) -> float:
    """Read so many streams at once; return tokens a second."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def read() -> int:
            body = {**BODY, "max_tokens": num_tokens}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                return (await response.read()).count(b'"content": " ')

        began_s = time.perf_counter()
        counts = await asyncio.gather(*(read() for _ in range(count)))
    assert counts == [num_tokens] * count, counts
    return sum(counts) / (time.perf_counter() - began_s)


async def first_tokens(urls: tuple[str, ...], count: int) -> list[float]:
    """Return the median first token of each address, asked in turn, in milliseconds."""
    times: list[list[float]] = [[] for _ in urls]
    async with aiohttp.ClientSession() as session:
        for _ in range(count):
            for url, of_url in zip(urls, times, strict=True):
                sent_s = time.perf_counter()
                async with session.post(f"{url}/v1/chat/completions", json={**BODY, "max_tokens": 2}) as response:
                    while b'"content": " ' not in await response.content.readany():
                        pass
                    of_url.append(time.perf_counter() - sent_s)
                    await response.read()
    return [statistics.median(of_url) * 1000 for of_url in times]


def costs(arguments: Namespace) -> dict[str, Any]:
    """Measure what the door itself costs."""
    with upstream("--step-ms", "8") as steady, upstream() as at_once, door(steady) as (url, process):
        first = asyncio.run(first_tokens((steady, url), 20))  # warm
        before = process.cpu_times()
        per_s = asyncio.run(streams(url, arguments.streams, arguments.tokens))
        after = process.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        resident = process.memory_info().rss
        with door(at_once) as (quick, _):
            first = asyncio.run(first_tokens((at_once, quick), 300))
            most = asyncio.run(streams(quick, arguments.streams, 4 * arguments.tokens))
    num_tokens = arguments.streams * arguments.tokens
    return {
        "tokens_per_s": round(per_s),
        "cpu_us_per_token": round(cpu_s / num_tokens * 1e6, 1),
        "tokens_per_s_of_one_core": round(num_tokens / cpu_s),
        "most_tokens_per_s": round(most),  # in few, large parts
        "first_token_ms": {"direct": round(first[0], 2), "through": round(first[1], 2)},
        "resident_mb": round(resident / 1e6),
    }


def beside(arguments: Namespace, *options: str) -> list[dict[str, Any]]:
    """Measure chat alone and beside documents: without the door, and through it."""
    engine = ("--step-ms", "15", "--token-us", "900", "--chunk", str(arguments.chunk), *options)
    rows = []
    for has_door in (False, True):
        with contextlib.ExitStack() as running:
            url = running.enter_context(upstream(*engine))
            fields: dict[str, Any] = {"priority": 10}
            if has_door:
                objectives = {
                    "default_ttft_s": str(arguments.ttft),
                    "default_tpot_s": str(arguments.tpot),
                    "drain_s": "1",
                }
                url, _ = running.enter_context(door(url, **objectives))
                fields = {"service_tier": "flex"}
            load = Load(url, arguments, {}, fields)
            row: dict[str, Any] = {
                "server": "by priority" if "--priority" in options else "by arrival",
                "door": has_door,
                "alone": asyncio.run(load.phase(0)),
                "beside": asyncio.run(load.phase(arguments.documents)),
            }
            rows.append(row)
            for phase in ("alone", "beside"):
                figures = " ".join(f"{name} {row[phase][name]:.3f}" for name in SHOWN)
                print(f"{row['server']:12} {'through' if has_door else 'direct':8} {phase:7} {figures}", flush=True)
    return rows


def main() -> None:
    """Measure, print, keep."""
    parser = parser_of(__doc__, rounds=1, name="serving/upstream_door")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--documents", type=int, default=0, help="outstanding")
    parser.add_argument("--orders", nargs="*", default=["arrival", "priority"], help="of the server's queue")
    parser.add_argument("--rate", type=float, default=0.8, help="chats a second")
    parser.add_argument("--ttft", type=float, default=1.0)
    parser.add_argument("--tpot", type=float, default=0.3)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step at most")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm", type=float, default=30.0, help="seconds of documents before chats")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rounds = []
    for _ in range(arguments.rounds):
        rounds.append(costs(arguments))
        print(json.dumps(rounds[-1]), flush=True)
    options: dict[str, tuple[str, ...]] = {"arrival": (), "priority": ("--priority",)}
    orders = arguments.orders if arguments.documents else ()
    rows = [row for order in orders for row in beside(arguments, *options[order])]
    settings = ("streams", "tokens", "documents", "rate", "ttft", "tpot", "chunk", "seconds", "warm", "seed")
    named = {name: getattr(arguments, name) for name in settings}
    write_result(arguments.name, {**named, "costs": rounds, "beside": rows})


if __name__ == "__main__":
    main()
