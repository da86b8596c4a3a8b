"""Cost of the gateway itself: streams over HTTP from a backend that answers at once.

`server` runs the gateway with a scripted backend in this process; the client runs in a second process, so that the CPU
time measured is the gateway's alone. Every answer is then read as HTTP and as JSON, event by event, outside the time
that is measured. Run: python -m benchmarks.gateway.streams [--streams 64] [--tokens 400]
"""

import asyncio
import json
import multiprocessing
import resource
import time

import httptools
import uvloop

from alignedserve.api.models.model_services import ModelCard
from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.server import HttpServer, bind
from alignedserve.gateway.services import build_services
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from tests.harnesses.scripted_backend import Script, ScriptedBackend


async def stream_once(port: int, max_tokens: int) -> tuple[bytes, float]:
    """Return (all that was answered, seconds to its first byte) of one streamed chat completion."""
    fields = {"model": "bench", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    body = json.dumps({**fields, "max_tokens": max_tokens, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    started_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
    parts, first_s = [], 0.0
    while received := await reader.read(1 << 16):
        first_s = first_s or time.perf_counter() - started_s
        parts.append(received)
    writer.close()
    return b"".join(parts), first_s


def checked_events(answer: bytes, max_tokens: int) -> int:
    """Return how many events an answer has, after reading it as HTTP, server-sent events and JSON."""
    body: list[bytes] = []
    ends: list[bool] = []

    class Reader:
        def on_body(self, part: bytes) -> None:
            body.append(part)

        def on_message_complete(self) -> None:
            ends.append(True)

    parser = httptools.HttpResponseParser(Reader())
    parser.feed_data(answer)
    *events, done, rest = b"".join(body).decode().split("\n\n")
    assert (parser.get_status_code(), ends, done, rest) == (200, [True], "data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[-1]["finish_reason"] == "length"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == " the" * max_tokens
    return len(events) + 1


def run_client(
    port: int, streams: int, max_tokens: int, results: "multiprocessing.Queue[tuple[int, float, float]]"
) -> None:
    """Run all streams at once; put (events, wall seconds, slowest first event)."""

    async def run() -> tuple[int, float, float]:
        started_s = time.perf_counter()
        done = await asyncio.gather(*(stream_once(port, max_tokens) for _ in range(streams)))
        wall_s = time.perf_counter() - started_s
        return sum(checked_events(answer, max_tokens) for answer, _ in done), wall_s, max(first for _, first in done)

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
