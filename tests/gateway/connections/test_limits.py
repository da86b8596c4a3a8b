"""Raw connections to a real server: what is too much or too slow is refused, what is merely unusual is answered."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from alignedserve.config.sections import GatewayConfig
from alignedserve.core.request import Request, RequestClass
from alignedserve.gateway.connections import http_protocol
from alignedserve.gateway.connections.limits import ConnectionLimits, file_shortage, most_connections
from alignedserve.gateway.server import HttpServer, bind
from tests.gateway.support import saying, services_for
from tests.harnesses.scripted_backend import Script, ScriptedBackend
from tests.support.marks import each

pytestmark = pytest.mark.slow

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
PATIENCE_S = 60.0

Connect = Any


@asynccontextmanager
async def serving(script: Any = None, **config: Any) -> AsyncIterator[Connect]:
    """Yield what opens a connection to a running server."""
    backend = ScriptedBackend(script or saying("the quick brown fox"))
    server = HttpServer(services_for(backend, GatewayConfig(**config)), bind("127.0.0.1", 0))
    await server.start()
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writers.append(writer)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in writers:
            writer.close()
        await server.stop()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return all that comes until the server closes the connection."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    except ConnectionError:
        return b""


async def status_of(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return int((await reader.readline()).split()[1])


def chat(*headers: bytes, **fields: Any) -> bytes:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}).encode()
    head = [b"POST /v1/chat/completions HTTP/1.1", b"Host: localhost", b"Content-Type: application/json", *headers]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body), b"", body])


async def test_headers_without_end_are_refused() -> None:
    async with serving(header_timeout_s=PATIENCE_S) as connect:
        _, writer = await connect()
        writer.write(GET)
        num_sent = 0
        try:
            while num_sent < 300 << 20:
                writer.write(b"x-filler: " + b"y" * 65_000 + b"\r\n")
                await writer.drain()
                num_sent += 65_000
        except ConnectionError:
            pass
        assert num_sent < 50 << 20  # a socket's buffers of both sides, at most
        other, writer = await connect()
        writer.write(GET + b"Connection: close\r\n\r\n")
        assert b"200 OK" in await rest_of(other)


@each(
    "head",
    [
        GET + b"x: " + b"y" * 70_000,
        GET + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
        GET + b"a: b\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["one that has no end", "one", "many", "a path"],
)
async def test_a_large_head_is_refused(head: bytes) -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(head)
        answer = await rest_of(reader)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


@each("sent", [b"", b"GE", GET, b"\r\n"], ids=repr)
async def test_a_connection_that_sends_no_request_is_closed(sent: bytes) -> None:
    async with serving(header_timeout_s=0.2) as connect:
        reader, writer = await connect()
        writer.write(sent)
        answer = await rest_of(reader)
    assert answer.startswith(b"HTTP/1.1 408 " if sent.strip() else b"")
    assert bool(answer) == bool(sent.strip())


async def test_a_connection_that_is_kept_alive_by_empty_lines_is_closed() -> None:
    async with serving(header_timeout_s=0.2) as connect:
        reader, writer = await connect()
        writer.write(GET + b"\r\n")
        assert await status_of(reader) == 200
        writer.write(b"\r\n")
        assert (await rest_of(reader)).endswith(b"}")


async def test_headers_that_trickle_are_refused() -> None:
    async with serving(header_timeout_s=0.2) as connect:
        reader, writer = await connect()
        for letter in GET + b"a: b\r\n" * 12:
            if not writer.is_closing():
                writer.write(bytes([letter]))
            await asyncio.sleep(0.01)
        assert (await rest_of(reader))[:13] in (b"HTTP/1.1 408 ", b"")  # a reset may overtake the answer


@each("num_bytes", [2, 200_000], ids=["a little", "until the buffers are full"])
async def test_a_body_that_is_declared_too_large_is_refused_at_once(num_bytes: int) -> None:
    async with serving() as connect:
        reader, writer = await connect()
        head = chat().replace(b"Content-Length", b"X-Length").partition(b"\r\n\r\n")[0]
        writer.write(head + b"\r\nContent-Length: 1000000000\r\n\r\n" + b"{" * num_bytes)
        assert await status_of(reader) == 413


async def test_a_refused_body_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_LINGER_S", 0.2)
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(chat().replace(b"Content-Length: ", b"Content-Length: 99999"))
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 413 ")


async def test_a_body_that_trickles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_BODY_CHECK_S", 0.2)
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(chat()[:-20])
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 408 ")


@each(
    "body", [b"0\r\n" + b"a: b\r\n" * 40_000, b"1;" + b"x" * 200_000, b"0\r\na: " + b"x" * 200_000], ids=lambda b: b[:6]
)
async def test_what_stands_around_a_body_is_bounded(body: bytes) -> None:
    async with serving() as connect:
        reader, writer = await connect()
        head = chat().partition(b"\r\n\r\n")[0].replace(b"Content-Length", b"X-Length")
        writer.write(head + b"\r\nTransfer-Encoding: chunked\r\n\r\n")
        await writer.drain()
        for place in range(0, len(body), 20_000):
            writer.write(body[place : place + 20_000])
            await asyncio.sleep(0.001)
        assert (await rest_of(reader))[:13] in (b"HTTP/1.1 400 ", b"")


async def test_a_half_closed_client_is_answered() -> None:
    async with serving(lambda _: Script((5,) * 8, first_token_delay_s=0.2)) as connect:
        for request in (chat(), chat(stream=True), chat() + chat(b"Connection: close")):
            reader, writer = await connect()
            writer.write(request)
            writer.write_eof()
            answer = await rest_of(reader)
            final = answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
            assert final.startswith(b"HTTP/1.1 200 OK\r\n")
            assert final.count(b"HTTP/1.1 200 OK") == 1 + (b"close" in request)
            assert final.endswith((b"}", b"0\r\n\r\n"))


async def test_a_client_that_leaves_while_requests_wait_behind_its_first_is_found_out() -> None:
    scripts = [Script((5, 6)), Script((5, 6), held_until=asyncio.Event())]
    async with serving(lambda _: scripts.pop(), max_concurrent_requests=1) as connect:
        reader, writer = await connect()
        writer.write(chat(stream=True) + GET + b"\r\n")
        assert await status_of(reader) == 200
        writer.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                reader, writer = await connect()
                writer.write(chat(b"Connection: close"))
                if (await rest_of(reader)).startswith(b"HTTP/1.1 200 "):  # the first one's place is free
                    break


async def test_a_half_closed_client_with_requests_behind_its_first_gets_whole_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "_PROBE_S", 0.01)
    held = asyncio.Event()
    async with serving(lambda _: Script((5, 6), held_until=held)) as connect:
        reader, writer = await connect()
        writer.write(chat(stream=True) + GET + b"\r\n")
        assert await status_of(reader) == 200
        writer.write_eof()
        asyncio.get_running_loop().call_later(0.1, held.set)
        answers = await rest_of(reader)
    assert answers.partition(b"data: [DONE]")[0].count(b"HTTP/1.1") == 0
    assert answers.count(b"HTTP/1.1 200 OK") == 1


async def test_a_body_that_still_comes_when_the_answer_before_it_ends_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_LINGER_S", 0.02)
    async with serving() as connect:
        reader, writer = await connect()
        body = chat(b"Connection: close")
        writer.write(GET + b"\r\n" + body[:-5])
        assert await status_of(reader) == 200
        await asyncio.sleep(0.1)
        writer.write(body[-5:])
        assert b"HTTP/1.1 200 OK" in await rest_of(reader)


async def test_half_a_request_is_not_waited_for_when_the_client_ends() -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(chat()[:-5])
        writer.write_eof()
        assert await rest_of(reader) == b""


async def test_pipelined_requests_are_answered_in_turn() -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(chat() * 5 + (GET + b"\r\n") * 5 + chat(b"Connection: close"))
        answer = await rest_of(reader)
        kinds = [b'"choices"' in part for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
        assert kinds == [True] * 5 + [False] * 5 + [True]


async def test_a_pipeline_without_end_is_closed() -> None:
    async with serving(lambda _: Script((5,) * 8, first_token_delay_s=PATIENCE_S)) as connect:
        reader, writer = await connect()
        writer.write(chat() + (GET + b"\r\n") * 1000)
        assert await rest_of(reader) == b""


@each("limit", ["max_connections", "max_connections_per_address"])
async def test_too_many_connections_are_refused_until_others_end(limit: str) -> None:
    async with serving(**{limit: 3}) as connect:
        held = [await connect() for _ in range(3)]
        for reader, writer in held:
            writer.write(GET + b"\r\n")
            assert await status_of(reader) == 200
        refused, _ = await connect()
        answer = await rest_of(refused)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        held[0][1].close()
        async with asyncio.timeout(PATIENCE_S):
            status = 503
            while status == 503:
                reader, writer = await connect()
                writer.write(GET + b"\r\n")
                line = await reader.readline()
                status = int(line.split()[1]) if line else 503
        assert status == 200


def test_connections_are_counted_by_address() -> None:
    limits = ConnectionLimits.of(GatewayConfig(max_connections=3, max_connections_per_address=2))
    first, second, third, fourth, fifth = (limits.admit(address) for address in "aaabb")
    assert (third, fifth) == (None, None)
    assert None not in (first, second, fourth)
    assert first is not None
    assert second is not None
    first.leave()
    assert limits.admit("b")
    assert not limits.admit("a")
    second.leave()
    assert {address: counts.num_open for address, counts in limits.of_address.items()} == {"b": 2}
    assert ConnectionLimits.of(GatewayConfig(max_connections=1 << 40)).max_connections == most_connections()


@each(("num_files", "most"), [(1024, 768), (8192 + 255, 8191), (100, 50)])
def test_a_limit_of_files_below_that_of_connections_is_told(
    monkeypatch: pytest.MonkeyPatch, num_files: int, most: int
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (num_files // 2, num_files))
    warning = file_shortage(GatewayConfig())
    assert warning is not None
    assert warning.startswith(f"a gateway may open {num_files} files here, enough for {most} connections where")
    assert warning.endswith(f"or set it to {most}")


@each("num_files", [8192 + 256, 1 << 20, -1])
def test_enough_files_are_no_word(monkeypatch: pytest.MonkeyPatch, num_files: int) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, num_files))
    assert file_shortage(GatewayConfig()) is None


def test_best_effort_has_three_quarters_of_the_places_in_all_and_of_an_address() -> None:
    limits = ConnectionLimits.of(GatewayConfig(max_connections=12, max_connections_per_address=8))
    own = [limits.admit("a") for _ in range(8)]
    assert [place is not None and place.take_best_effort() for place in own] == [True] * 6 + [False] * 2
    others = [limits.admit("b") for _ in range(4)]
    assert [place is not None and place.take_best_effort() for place in others] == [True] * 3 + [False]
    assert own[0] is not None
    assert own[0].take_best_effort()  # it has its place already
    own[0].take_real_time()
    own[0].take_real_time()
    assert others[3] is not None
    assert others[3].take_best_effort()
    for place in (*own, *others):
        assert place is not None
        place.leave()
    assert (limits.all.num_open, limits.all.num_best_effort, limits.of_address) == (0, 0, {})


async def _document(connect: Connect, *headers: bytes) -> bytes:
    reader, writer = await connect()
    writer.write(chat(*headers, service_tier="flex", stream=True, max_tokens=1))
    return await rest_of(reader)


@each("limit", ["max_connections", "max_connections_per_address"])
async def test_documents_that_wait_leave_connections_to_chat(limit: str) -> None:
    held = asyncio.Event()
    script = Script((5, 6), held_until=held)

    def scripted(request: Request) -> Script:
        return script if request.request_class is RequestClass.BEST_EFFORT else Script((5, 6))

    async with serving(scripted, **{limit: 8}) as connect:
        documents = [await connect() for _ in range(6)]
        for _, writer in documents:
            writer.write(chat(service_tier="flex", stream=True))
        for reader, _ in documents:
            assert await status_of(reader) == 200  # its first token is there, and no other comes
        for _ in range(20):  # each gives the connection that it found back
            refused = await _document(connect)
            assert refused.startswith(b"HTTP/1.1 429 ")
            assert b"connection: close\r\n" in refused.lower()
            assert b'"code":"resource_unavailable"' in refused
        for _ in range(3):
            reader, writer = await connect()
            writer.write(chat(b"Connection: close"))
            assert (await rest_of(reader)).startswith(b"HTTP/1.1 200 ")
        held.set()


async def test_a_connection_is_of_the_class_of_its_last_request() -> None:
    async with serving(max_connections=4) as connect:
        kept = [await connect() for _ in range(3)]
        for reader, writer in kept:
            writer.write(chat(service_tier="flex"))
            assert await status_of(reader) == 200
        assert (await _document(connect)).startswith(b"HTTP/1.1 429 ")  # three idle ones are of documents
        reader, writer = kept[0]
        await reader.readuntil(b"}]")
        writer.write(chat(b"Connection: close"))
        await rest_of(reader)
        async with asyncio.timeout(PATIENCE_S):
            while (await _document(connect, b"Connection: close")).startswith(b"HTTP/1.1 429 "):
                pass  # the server has yet to see that the connection is closed
