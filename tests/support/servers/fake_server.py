"""A small OpenAI-compatible server whose every answer is scripted: what the tests measure the client commands against.

Real sockets, real HTTP/1.1 with chunked bodies, and faults that a proper web framework would not let through.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

MODEL = "fake-model"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Script:
    """The course of one completion."""

    pieces: tuple[str, ...] = ("Hello", " there", ".")  # one chunk each
    thoughts: tuple[str, ...] = ()  # before them
    first_delay_s: float = 0.0
    gap_s: float = 0.0
    held_until: asyncio.Event | None = None  # nothing is answered before
    status: int = 200
    error_code: str = ""  # of a status that is not 200
    error_after: int | None = None  # an error event after that many pieces
    cut_after: int | None = None  # the connection is cut after that many pieces
    ends_early_after: int | None = None  # the body ends properly, but without a finish reason
    tokens_per_piece: int = 1
    has_usage: bool = True
    has_logprobs: bool = False
    finish_reason: str = "stop"


Respond = Callable[[dict[str, Any]], Script]


@dataclass(slots=True)
class FakeServer:
    """Async context manager; listens on 127.0.0.1."""

    respond: Respond = lambda body: Script()
    metrics_page: Callable[[], str] = lambda: ""
    requests: list[dict[str, Any]] = field(default_factory=list)  # bodies, in order of arrival
    headers: list[dict[str, str]] = field(default_factory=list)  # of completions, names in lower case
    models: tuple[str, ...] = (MODEL,)
    port: int = 0  # 0: a free one
    num_open: int = 0  # completions being answered now
    url: str = ""
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", self.port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening; connections end with the event loop."""
        if self._server is not None:
            self._server.close()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The client may go away at any moment; a test says by itself what it expects of that.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._answer_one(reader, writer):
                pass
        writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return False to close the connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *rest = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
        content = await reader.readexactly(int(headers.get("content-length", "0")))
        match first.split(" ")[1]:
            case "/v1/models":
                return await _plain(
                    writer, 200, msgspec.json.encode({"object": "list", "data": [{"id": name} for name in self.models]})
                )
            case "/metrics":
                return await _plain(writer, 200, self.metrics_page().encode())
            case "/v1/chat/completions" | "/v1/completions":
                return await self._complete(msgspec.json.decode(content), headers, writer)
            case _:
                return await _plain(writer, 404, b'{"error":{"message":"no such route"}}')

    async def _complete(self, body: dict[str, Any], headers: dict[str, str], writer: asyncio.StreamWriter) -> bool:
        self.requests.append(body)
        self.headers.append(headers)
        script = self.respond(body)
        if script.status != 200:
            error = {"message": "scripted refusal", "type": "x", "code": script.error_code or None}
            return await _plain(writer, script.status, msgspec.json.encode({"error": error}))
        self.num_open += 1
        try:
            return await _stream(script, "messages" in body, writer)
        finally:
            self.num_open -= 1


async def _plain(writer: asyncio.StreamWriter, status: int, body: bytes) -> bool:
    writer.write(b"HTTP/1.1 %d Scripted\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
    await writer.drain()
    return True


async def _stream(script: Script, is_chat: bool, writer: asyncio.StreamWriter) -> bool:
    writer.write(_STREAM_HEAD)
    await asyncio.sleep(script.first_delay_s)
    if script.held_until is not None:
        await script.held_until.wait()
    for thought in script.thoughts:
        await _send(writer, _event({"choices": [{"index": 0, "delta": {"reasoning_content": thought}}]}))
    for count, piece in enumerate(script.pieces):
        if count:
            await asyncio.sleep(script.gap_s)
        if count == script.cut_after:
            return False
        if count == script.ends_early_after:
            break
        if count == script.error_after:
            await _send(
                writer, b'event: error\ndata: {"error":{"message":"scripted failure","type":"server_error"}}\n\n'
            )
            break
        await _send(writer, _event({"choices": [_choice(script, piece, None, is_chat)]}))
    else:
        await _send_end(script, is_chat, writer)
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True


async def _send_end(script: Script, is_chat: bool, writer: asyncio.StreamWriter) -> None:
    await _send(writer, _event({"choices": [_choice(script, "", script.finish_reason, is_chat)]}))
    if script.has_usage:
        num_tokens = len(script.pieces) * script.tokens_per_piece
        await _send(writer, _event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_tokens}}))
    await _send(writer, b"data: [DONE]\n\n")


def _choice(script: Script, piece: str, finish_reason: str | None, is_chat: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    choice |= {"delta": {"content": piece}} if is_chat else {"text": piece}
    if script.has_logprobs and piece:
        choice["logprobs"] = {"content": [{"token": "x", "logprob": -1.0}] * script.tokens_per_piece}
    return choice


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def _send(writer: asyncio.StreamWriter, event: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))
    await writer.drain()


@contextlib.contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """Run the server in a thread with an event loop of its own, for commands that start theirs."""
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with server:
            started.set()
            await stop.wait()

    thread = threading.Thread(target=_run, args=(loop, serve), daemon=True)
    thread.start()
    assert started.wait(60.0), "the fake server did not start"
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5.0)


def _run(loop: asyncio.AbstractEventLoop, serve: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await serve()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
