"""What long bodies of some clients cost the streams of others: gaps between tokens, with and without such bodies.

A gateway over a scripted backend whose tokens come every 20 ms runs in this process; a second one reads streams and
measures, a third sends bodies of 4 MB, one kind after the other, from four connections.
Run: python -m benchmarks.gateway.bodies [--rounds 1] [--streams 64] [--tokens 400] [--kind KIND]
"""

import asyncio
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import psutil
import uvloop

from alignedserve.api.models.model_card import ModelCard
from alignedserve.api.work_lanes import favour_the_loop
from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.server import HttpServer, bind
from alignedserve.gateway.services import build_services
from alignedserve.process.heap import settle_heap
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from tests.harnesses.scripted_backend import Script, ScriptedBackend

_TOKEN_S = 0.02
_NUM_BYTES = 4_000_000
_NUM_SENDERS = 4


def bodies() -> dict[str, tuple[str, dict[str, Any]]]:
    spaces, words = " " * _NUM_BYTES, "some words " * (_NUM_BYTES // 11)
    one = {"role": "user", "content": "hi " * 300}
    return {
        "completion of spaces": ("/v1/completions", {"prompt": spaces}),
        "chat of words": ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}),
        "chat of many messages": ("/v1/chat/completions", {"messages": [one] * 4000}),
        "message": ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": words}]}),
        "response": ("/v1/responses", {"input": words}),
        "text to tokenize": ("/tokenize", {"prompt": words}),
        "token ids": ("/v1/completions", {"prompt": [1000] * (_NUM_BYTES // 6)}),
        "empty lists": ("/v1/completions", {"prompt": [[]] * (_NUM_BYTES // 4)}),
        "small numbers": ("/v1/embeddings", {"input": [1] * (_NUM_BYTES // 3)}),
    }


def _request(path: str, fields: dict[str, Any]) -> bytes:
    body = json.dumps({"model": "bench", "max_tokens": 1, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


async def _gaps(port: int, max_tokens: int) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {"prompt": "hi", "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
    writer.write(_request("/v1/completions", fields))
    gaps, last_s = [], None
    while received := await reader.read(1 << 16):
        now, num_events = time.perf_counter(), received.count(b"data: ")
        if last_s is not None and num_events:
            gaps += [now - last_s, *[0.0] * (num_events - 1)]
        last_s = now if num_events else last_s
    writer.close()
    return gaps


def read_streams(port: int, streams: int, max_tokens: int, results: "multiprocessing.Queue[list[float]]") -> None:
    async def run() -> list[float]:
        read = await asyncio.gather(*(_gaps(port, max_tokens) for _ in range(streams)))
        return [gap for gaps in read for gap in gaps]

    results.put(uvloop.run(run()))


def send_bodies(port: int, names: Sequence[str], results: "multiprocessing.Queue[tuple[str, int, float]]") -> None:
    """Send bodies of these kinds until the process ends; put the kind of each, its status and its answer's time."""
    known = bodies()
    kinds = {kind: _request(*known[kind]) for kind in names}

    async def send(first: int) -> None:
        for place in islice(count(), first, None):
            kind = list(kinds)[place % len(kinds)]
            started_s = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(kinds[kind])
            status = (await reader.readline()).split()[1:2]
            results.put((kind, int(status[0]) if status else 0, time.perf_counter() - started_s))
            writer.close()

    async def run() -> None:
        await asyncio.gather(*(send(2 * number) for number in range(_NUM_SENDERS)))

    uvloop.run(run())


@contextmanager
def _sending(
    port: int, names: Sequence[str], results: "multiprocessing.Queue[tuple[str, int, float]]"
) -> Iterator[None]:
    sender = multiprocessing.get_context("spawn").Process(target=send_bodies, args=(port, names, results))
    sender.start()
    try:
        yield
    finally:
        sender.kill()
        sender.join()


async def _measured(port: int, streams: int, max_tokens: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[list[float]] = context.Queue()
    reader = context.Process(target=read_streams, args=(port, streams, max_tokens, results))
    stolen_s = _stolen_s()
    reader.start()
    gaps = await asyncio.to_thread(results.get)
    await asyncio.to_thread(reader.join)
    added = statistics.quantiles([max(0.0, gap - _TOKEN_S) * 1e3 for gap in gaps], n=1000)
    return {
        "tokens": len(gaps),
        "added_p50_ms": round(added[499], 2),
        "added_p99_ms": round(added[989], 2),
        "added_p999_ms": round(added[998], 2),
        "longest_gap_ms": round(max(gaps) * 1e3, 1),
        "stolen_ms": round((_stolen_s() - stolen_s) * 1e3),
    }


def _stolen_s() -> float:
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


async def measure(streams: int, max_tokens: int, context_len: int, names: Sequence[str]) -> dict[str, Any]:
    """Measure without bodies, then with bodies of these kinds."""
    tokenizer = Tokenizer.load(pocket_folder())
    word = tokenizer.encode(" the", add_special_tokens=False)[0]
    backend = ScriptedBackend(lambda request: Script((word,) * request.sampling.max_tokens, token_delay_s=_TOKEN_S))
    services = build_services(GatewayConfig())
    services.add_model(ModelCard("bench", pocket_folder(), context_len), backend, tokenizer)
    server = HttpServer(services, bind("127.0.0.1", 0))
    await server.start()
    settle_heap()  # as the process of a gateway does
    answers: multiprocessing.Queue[tuple[str, int, float]] = multiprocessing.get_context("spawn").Queue()
    alone = await _measured(server.port, streams, max_tokens)
    with _sending(server.port, names, answers):
        await asyncio.to_thread(answers.get)  # the sender has begun
        beside = await _measured(server.port, streams, max_tokens)
    await server.stop()
    await asyncio.to_thread(services.close)
    answered: dict[str, list[tuple[int, float]]] = {}
    while not answers.empty():
        kind, status, answer_s = answers.get()
        answered.setdefault(kind, []).append((status, answer_s))
    return {"alone": alone, "beside_bodies": beside, "answers": {kind: _told(of) for kind, of in answered.items()}}


def _told(answers: Sequence[tuple[int, float]]) -> dict[str, Any]:
    median_s = statistics.median(answer_s for _, answer_s in answers)
    return {"statuses": Counter(status for status, _ in answers), "median_s": round(median_s, 2)}


def main() -> None:
    """Measure, print, keep."""
    parser = parser_of(__doc__, rounds=1, name="serving/gateway_bodies")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--kind", action="append", choices=list(bodies()), help="may be repeated; default: all")
    arguments = parser.parse_args()
    favour_the_loop()
    names = arguments.kind or list(bodies())
    rounds = []
    for _ in range(arguments.rounds):
        rounds.append(uvloop.run(measure(arguments.streams, arguments.tokens, arguments.context, names)))
        print(json.dumps(rounds[-1], indent=1))
    write_result(arguments.name, {"streams": arguments.streams, "context": arguments.context, "rounds": rounds})


if __name__ == "__main__":
    main()
