"""A small OpenAI-compatible server over HTTP that answers by a script, at once or by a simulated engine, and can fail.

Run: python -m tests.harnesses.upstream_server --port 8101 [--step-ms 10]; it prints its port once it listens.
"""

import argparse
import asyncio
import itertools
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import httptools
import uvloop
from typing_extensions import override

_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


@dataclass
class Engine:
    """Continuous batching on the real clock: a step takes some time, more with more tokens; prompts come in chunks."""

    step_s: float = 0.0  # 0: tokens come at once
    token_s: float = 0.0  # more for each token of a step
    max_seqs: int = 256
    chunk: int = 512
    has_priority: bool = False
    waiting: deque["Sequence"] = field(default_factory=deque)
    running: list["Sequence"] = field(default_factory=list)
    most_running: int = 0

    async def run(self) -> None:
        while True:
            if not (self.waiting or self.running):
                await asyncio.sleep(0.001)
                continue
            self._admit()
            budget, ready = self.chunk, []
            for sequence in self.running:
                if sequence.num_left == 0:
                    ready.append(sequence)
                    budget -= 1
            for sequence in self.running:
                taken = min(max(budget, 0), sequence.num_left)
                sequence.num_left -= taken
                budget -= taken
                if taken and not sequence.num_left:
                    ready.append(sequence)
            await asyncio.sleep(self.step_s + self.token_s * (self.chunk - budget))
            for sequence in ready:
                sequence.num_made += 1
                sequence.tokens.put_nowait(sequence.num_made)
                sequence.is_over |= sequence.num_made >= sequence.max_tokens
            self.running = [sequence for sequence in self.running if not sequence.is_over]

    def _admit(self) -> None:
        if self.has_priority:
            self.waiting = deque(sorted(self.waiting, key=lambda sequence: sequence.priority))
        while self.waiting and len(self.running) < self.max_seqs:
            sequence = self.waiting.popleft()
            if not sequence.is_over:
                self.running.append(sequence)
        self.most_running = max(self.most_running, len(self.running))


@dataclass
class Sequence:
    """One request in the engine."""

    num_left: int
    max_tokens: int
    priority: int = 0
    num_made: int = 0
    is_over: bool = False
    tokens: "asyncio.Queue[int]" = field(default_factory=asyncio.Queue)


@dataclass
class UpstreamServer:
    """Serves from `start` to `stop`. Its faults may be changed at any time."""

    model: str = "m"
    engine: Engine = field(default_factory=Engine)
    fault: str = ""  # by name, see `_answer`
    fails_after: int = 3  # tokens of a stream that breaks
    owner: str = "scripted"
    root: str | None = None
    tokens_per_word: int = 1  # of prompts
    port: int = 0
    prefix: str = ""  # of every word: which server said it
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_open: int = 0
    num_aborted: int = 0
    keeps_bodies: bool = True

    async def start(self) -> "UpstreamServer":
        loop = asyncio.get_running_loop()
        self._connections: set[_Connection] = set()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._running = asyncio.create_task(self.engine.run()) if self.engine.step_s else None
        return self

    async def stop(self) -> None:
        self._server.close()
        if self._running is not None:
            self._running.cancel()
        for connection in tuple(self._connections):
            connection.transport.abort()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def models(self) -> dict[str, Any]:
        card: dict[str, Any] = {"id": self.model, "object": "model", "owned_by": self.owner}
        card |= {"root": self.root} if self.root is not None else {}
        return {"object": "list", "data": [card]}

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return len(prompt)
        text = json.dumps(body.get("messages") or body.get("prompt") or body.get("input") or "")
        return self.tokens_per_word * (len(text) // 5 + 1)


class _Connection(asyncio.Protocol):
    def __init__(self, server: UpstreamServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._sequence: Sequence | None = None

    @override
    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._server._connections.add(self)

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self._server._connections.discard(self)
        if self._task is not None and not self._task.done():
            self._server.num_aborted += 1
            self._task.cancel()
        if self._sequence is not None:
            self._sequence.is_over = True

    @override
    def data_received(self, received: bytes) -> None:
        self._parser.feed_data(received)

    def on_url(self, url: bytes) -> None:
        self._path = url.decode()
        self._body: list[bytes] = []
        self._headers: dict[str, str] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        if self._server.fault == "hangs":
            return
        if self._path == "/v1/models":
            self._whole(200, self._server.models())
            return
        body = json.loads(b"".join(self._body))
        if self._server.keeps_bodies:
            self._server.bodies.append(body)
            self._server.headers.append(self._headers)
        self._task = asyncio.get_running_loop().create_task(self._answer(body))

    def _whole(self, status: int, document: Any, headers: str = "") -> None:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        self.transport.write(head.encode() + body)

    async def _answer(self, body: dict[str, Any]) -> None:
        fault = self._server.fault
        error = {"error": {"message": "secret words of the upstream", "type": "t", "code": "strange"}}
        if fault == "answers nothing":
            return
        if fault == "closes":
            self.transport.abort()
        elif fault == "no stream" and body.get("stream"):
            self._whole(200, {"choices": []})
        elif fault == "garbage":
            self._whole(200, b"<html>secret words</html>")
        elif fault.isdigit():
            self._whole(int(fault), error, "Retry-After: 1\r\n")
        elif fault == "refuses additions" and ("stream_options" in body or "priority" in body):
            self._whole(400, error)
        elif not self._path.endswith("completions"):
            self._whole(404, error)
        elif body.get("stream"):
            await self._stream(body)
        else:
            words = [self._word(index) async for index in self._tokens(body)]
            self._whole(
                200, {**self._chunk(message={"content": " ".join(words)}), "usage": self._usage(body, len(words))}
            )

    def _word(self, index: int) -> str:
        return self._server.prefix + _WORDS[index % len(_WORDS)]

    async def _tokens(self, body: dict[str, Any]) -> Any:
        engine, count = self._server.engine, body.get("max_tokens") or 8
        self._server.num_open += 1
        try:
            if not engine.step_s:
                for index in range(count):
                    yield index
                return
            self._sequence = Sequence(self._server.prompt_tokens(body), count, body.get("priority", 0))
            engine.waiting.append(self._sequence)
            for index in range(count):
                await self._sequence.tokens.get()
                yield index
        finally:
            self._server.num_open -= 1

    def _usage(self, body: dict[str, Any], count: int) -> dict[str, int]:
        if self._server.fault == "lies":
            return {"prompt_tokens": 1 << 40, "completion_tokens": -7}
        return {"prompt_tokens": self._server.prompt_tokens(body), "completion_tokens": count}

    def _chunk(self, **choice: Any) -> dict[str, Any]:
        return {
            "id": "c",
            "object": "chat.completion.chunk",
            "model": self._server.model,
            "choices": [{"index": 0, **choice}],
        }

    def _event(self, document: Any) -> None:
        payload = document if isinstance(document, str) else json.dumps(document)
        part = f"data: {payload}\n\n".encode()
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    async def _stream(self, body: dict[str, Any]) -> None:
        fault, is_chat = self._server.fault, self._path.endswith("chat/completions")
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        if is_chat:
            self._event(self._chunk(delta={"role": "assistant", "content": ""}))
        if fault == "dies before":
            self.transport.close()
            return
        pieces = {word: self._piece(word, is_chat) for word in (self._word(index) for index in range(len(_WORDS)))}
        count = 0
        async for index in self._tokens(body):
            if count == self._server.fails_after and fault in ("dies", "half", "says error"):
                if fault == "says error":
                    self._event({"error": {"message": "secret words of the upstream"}})
                if fault != "dies":
                    self.transport.write(b"0\r\n\r\n")
                self.transport.close()
                return
            part = pieces[self._word(index)]
            self.transport.write(part)
            count += 1
        ending: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        self._event(self._chunk(**ending, finish_reason="length"))
        if (body.get("stream_options") or {}).get("include_usage"):
            self._event({**self._chunk(), "choices": [], "usage": self._usage(body, count)})
        if fault != "no done":
            self._event("[DONE]")
        self.transport.write(b"0\r\n\r\n")

    def _piece(self, word: str, is_chat: bool) -> bytes:
        choice: dict[str, Any] = {"delta": {"content": f" {word}"}} if is_chat else {"text": f" {word}"}
        part = f"data: {json.dumps(self._chunk(**choice, finish_reason=None))}\n\n".encode()
        return b"%x\r\n%b\r\n" % (len(part), part)


async def _main(arguments: argparse.Namespace) -> None:
    engine = Engine(
        arguments.step_ms / 1000, arguments.token_us / 1e6, arguments.max_seqs, arguments.chunk, arguments.priority
    )
    owner = "vllm" if arguments.priority else "scripted"
    server = UpstreamServer(arguments.model, engine, port=arguments.port, owner=owner, keeps_bodies=False)
    await server.start()
    print(server.port, flush=True)
    for _ in itertools.count():
        await asyncio.sleep(3600)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="m")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--token-us", type=float, default=0.0)
    parser.add_argument("--max-seqs", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--priority", action="store_true")
    uvloop.run(_main(parser.parse_args()))
