"""Cost of the gateway itself: streams over HTTP from a backend that answers at once.

`server` runs the gateway with a scripted backend in this process; the client runs in a second process, so that the CPU
time measured is the gateway's alone. Run: python -m benchmarks.gateway_streams [--streams 64] [--tokens 400]
"""

import asyncio
import json
import multiprocessing
import resource
import time

import uvloop

from alignedserve.api.backend.scripted import Script, ScriptedBackend
from alignedserve.api.models.model_card import ModelCard
from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.server import HttpServer, bind
from alignedserve.gateway.services import build_services
from alignedserve.runtime.model.built_in import pocket_folder
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result


async def stream_once(port: int, max_tokens: int) -> tuple[int, float]:
    """Return (events, seconds to the first) of one streamed chat completion."""
    fields = {"model": "bench", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    body = json.dumps({**fields, "max_tokens": max_tokens, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    started_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
    num_events, first_s, tail = 0, 0.0, b""
    while received := await reader.read(1 << 16):
        first_s = first_s or time.perf_counter() - started_s
        num_events += (tail[-5:] + received).count(b"data: ")
        tail = received
    writer.close()
    return num_events, first_s


def run_client(
    port: int, streams: int, max_tokens: int, results: "multiprocessing.Queue[tuple[int, float, float]]"
) -> None:
    """Run all streams at once; put (events, wall seconds, slowest first event)."""

    async def run() -> tuple[int, float, float]:
        started_s = time.perf_counter()
        done = await asyncio.gather(*(stream_once(port, max_tokens) for _ in range(streams)))
        return sum(events for events, _ in done), time.perf_counter() - started_s, max(first for _, first in done)

    results.put(uvloop.run(run()))


async def measure(streams: int, max_tokens: int) -> dict[str, float]:
    """Measure one round: every token of every stream is one step of the backend and one event."""
    tokenizer = Tokenizer.load(pocket_folder())
    word = tokenizer.encode(" the", add_special_tokens=False)[0]
    backend = ScriptedBackend(lambda request: Script((word,) * request.sampling.max_tokens))
    model = ModelCard("bench", pocket_folder(), 1 << 20)
    services = build_services(GatewayConfig())
    services.add_model(model, backend, tokenizer)
    server = HttpServer(services, bind("127.0.0.1", 0))
    await server.start()
    results: multiprocessing.Queue[tuple[int, float, float]] = multiprocessing.get_context("spawn").Queue()
    client = multiprocessing.get_context("spawn").Process(
        target=run_client, args=(server.port, streams, max_tokens, results)
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    client.start()
    num_events, wall_s, first_s = await asyncio.to_thread(results.get)
    now_used = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.to_thread(client.join)
    await server.stop()
    cpu_s = now_used.ru_utime + now_used.ru_stime - used.ru_utime - used.ru_stime
    num_tokens = streams * max_tokens
    return {
        "tokens": num_tokens,
        "events": num_events,
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(num_tokens / wall_s),
        "gateway_cpu_us_per_token": round(cpu_s / num_tokens * 1e6, 1),
        "slowest_first_event_s": round(first_s, 3),
    }


def main() -> None:
    """Measure, print, keep."""
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    arguments = parser.parse_args()
    rounds = [uvloop.run(measure(arguments.streams, arguments.tokens)) for _ in range(arguments.rounds)]
    print(json.dumps(rounds, indent=2))
    write_result("serving/gateway_streams", {"streams": arguments.streams, "rounds": rounds})


if __name__ == "__main__":
    main()
