"""Chat beside thousands of `flex` streams that wait: its first tokens with and without them, and the cost of a stream.

    python -m benchmarks.promise.parked_streams  # some three minutes, the pocket model, two cores

A server of the pocket model. Three times in one run chats come one after another, four a second: alone; beside as many
documents as the worker runs at once, none of which waits; and beside 4 000 documents in all, nearly all of which wait.
All documents are streams of `flex` completions with answers of 1 900 tokens, from as many client addresses (127.0.0.x)
as `max_connections_per_address` asks for. The last two differ by what is parked alone; the first two by the documents
that run. The memory is the gateway's, before and after parking.
"""

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from typing import Any

import psutil
import uvloop

from alignedserve.core.metrics import percentile
from alignedserve.runtime.model.named_models import pocket_folder
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import served

MODEL = pocket_folder().name
ANSWER_LEN = 1900
PER_ADDRESS = 1000
PER_PROCESS = 2000
CHATS_PER_S = 4.0
TARGET_RATIO = 1.2


def _head(path: str, body: bytes, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *more, "", ""]).encode() + body


def _document(number: int) -> bytes:
    fields = {"model": MODEL, "prompt": f"spell otter {number}", "max_tokens": ANSWER_LEN, "ignore_eos": True}
    body = json.dumps({**fields, "stream": True, "service_tier": "flex"}).encode()
    return _head("/v1/completions", body)


async def _chat_ttft_s(port: int) -> float:
    """Return the seconds from connecting to the first token of a chat of its own connection."""
    fields: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "spell otter"}]}
    body = json.dumps({**fields, "stream": True, "max_tokens": 16}).encode()
    started_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_head("/v1/chat/completions", body, "Connection: close"))
    received = b""
    while b'"content":"' not in received.replace(b'"content":""', b""):
        more = await reader.read(1 << 16)
        if not more:
            raise RuntimeError(f"no token came: {received[:200]!r}")
        received += more
    seconds = time.perf_counter() - started_s
    while await reader.read(1 << 16):
        pass
    writer.close()
    return seconds


async def _chats(port: int, count: int) -> list[float]:
    """Return the times of chats that come at their moments, whatever the ones before them take."""
    started_s, tasks = time.perf_counter(), []
    for number in range(count):
        await asyncio.sleep(max(started_s + number / CHATS_PER_S - time.perf_counter(), 0.0))
        tasks.append(asyncio.create_task(_chat_ttft_s(port)))
    return [await task for task in tasks]


async def _hold(port: int, first: int, count: int, sent: Any, is_over: Event) -> None:
    """Open streams of documents and read what comes, until it is over."""

    async def document(number: int) -> None:
        """Stream a document to its end."""
        address = f"127.0.0.{2 + number // PER_ADDRESS}"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        writer.write(_document(number))
        with sent.get_lock():
            sent.value += 1
        last = received = b""
        while b"data: [DONE]" not in last:
            more = await reader.read(1 << 14)
            received, last = received or more, last[-12:] + more
            if not more or not received.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 100 ")):
                raise RuntimeError(f"a stream was refused or cut off: {received[:300]!r}")
        writer.close()

    async def stream(number: int) -> None:
        while not is_over.is_set():
            await document(number)

    tasks = []
    for number in range(first, first + count):
        tasks.append(asyncio.create_task(stream(number)))
        if number % 10 == 9:
            await asyncio.sleep(0.05)
    while not is_over.is_set():
        await asyncio.sleep(0.1)
        failed = [task for task in tasks if task.done() and task.exception() is not None]
        if failed:
            raise failed[0].exception()  # type: ignore[misc]
    for task in tasks:
        task.cancel()


def _run_holder(port: int, first: int, count: int, sent: Any, is_over: Event) -> None:
    uvloop.run(_hold(port, first, count, sent, is_over))


class Parking:
    """Processes that hold streams open."""

    def __init__(self, port: int) -> None:
        self._port, self._context = port, multiprocessing.get_context("spawn")
        self._is_over, self._sent = self._context.Event(), self._context.Value("i", 0)
        self._processes: list[Any] = []
        self._num_asked = 0

    def open(self, count: int) -> None:
        """Open so many streams more, and return once all have been sent."""
        for first in range(0, count, PER_PROCESS):
            arguments = (
                self._port,
                self._num_asked + first,
                min(PER_PROCESS, count - first),
                self._sent,
                self._is_over,
            )
            process = self._context.Process(target=_run_holder, args=arguments)
            process.start()
            self._processes.append(process)
        self._num_asked += count
        while self._sent.value < self._num_asked:
            self.check()
            time.sleep(0.1)

    def check(self) -> None:
        """Raise RuntimeError if a stream has ended or was refused."""
        if any(not process.is_alive() for process in self._processes):
            raise RuntimeError("a process that holds streams has ended")

    def close(self) -> None:
        """Close all streams."""
        self._is_over.set()
        while self._processes:
            self._processes.pop().join(30)


def _gateway_of(port: int) -> psutil.Process:
    for process in psutil.process_iter():
        try:
            listens = any(one.laddr.port == port and one.status == "LISTEN" for one in process.net_connections())
        except psutil.Error:
            continue
        if listens:
            return process
    raise RuntimeError("no process listens on the port")


def _times(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "chats": len(seconds),
        "ttft_p50_ms": round(1e3 * statistics.median(seconds), 2),
        "ttft_p99_ms": round(1e3 * percentile(sorted(seconds), 99.0), 2),
        "ttft_max_ms": round(1e3 * max(seconds), 2),
    }


def _cpu_share(process: psutil.Process, seconds: float, used_s: float) -> float:
    times = process.cpu_times()
    return round((times.user + times.system - used_s) / seconds, 3)


def measure(port: int, num_streams: int, num_running: int, num_chats: int) -> dict[str, Any]:
    """Measure chat alone, beside documents that run, and beside those and all that wait."""
    gateway, parking, figures = _gateway_of(port), Parking(port), dict[str, Any]()

    def phase(name: str) -> None:
        times = gateway.cpu_times()
        started_s, used_s = time.perf_counter(), times.user + times.system
        seconds = asyncio.run(_chats(port, num_chats))
        share = _cpu_share(gateway, time.perf_counter() - started_s, used_s)
        figures[name] = {**_times(seconds), "gateway_cpu_share": share}
        parking.check()
        print(name, figures[name], flush=True)

    asyncio.run(_chats(port, 20))
    phase("alone")
    parking.open(num_running)
    time.sleep(3.0)
    phase("documents run, none waits")
    before_bytes = gateway.memory_info().rss
    parking.open(num_streams - num_running)
    time.sleep(5.0)
    phase(f"{num_streams} streams open")
    parked_bytes = gateway.memory_info().rss - before_bytes
    parking.close()
    time.sleep(5.0)
    phase("alone again")
    figures["gateway_bytes_per_parked_stream"] = round(parked_bytes / (num_streams - num_running))
    parked = figures[f"{num_streams} streams open"]
    for base in ("documents run, none waits", "alone"):
        ratio = {name: round(parked[name] / figures[base][name], 2) for name in ("ttft_p50_ms", "ttft_p99_ms")}
        figures[f"ratio to: {base}"] = ratio
    figures["target_ratio_of_p99"] = TARGET_RATIO
    return figures


def main() -> None:
    """Measure, and record."""
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, default=4000)
    parser.add_argument("--running", type=int, default=64, help="documents that the worker runs at once")
    parser.add_argument("--chats", type=int, default=120, help="of each phase")
    parser.add_argument("--set", action="append", default=[], help="settings of the server")
    options = parser.parse_args()
    settings = [f"decode.max_running_requests={options.running}", *options.set]
    with served(pocket_folder(), settings) as port:
        figures = measure(port, options.streams, options.running, options.chats)
    print(json.dumps(figures, indent=2))
    write_result("serving/parked_streams", {"settings": settings, **figures})


if __name__ == "__main__":
    main()
