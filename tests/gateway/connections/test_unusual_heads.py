"""Heads that clients seldom send, over raw connections to a real server: none ends it, or is taken for another."""

import json

from tests.gateway.connections.test_limits import GET, chat, rest_of, serving, status_of
from tests.support.marks import each


@each("target", [b"CONNECT a:1", b"GET http://x", b"GET http://[x/"], ids=repr)
async def test_a_target_that_cannot_be_read_is_refused(target: bytes) -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await rest_of(reader)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__")


async def test_a_body_behind_a_wish_for_another_protocol_is_that_body() -> None:
    async with serving() as connect:
        reader, writer = await connect()
        in_chunks = chat(*UPGRADE, b"Transfer-Encoding: chunked").replace(b"Content-Length", b"X")
        head, _, body = in_chunks.partition(b"\r\n\r\n")
        writer.write(b"%b\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (head, len(body), body))
        writer.write(chat(*UPGRADE) + GET + b"\r\n" + chat(b"Connection: close"))
        answers = await rest_of(reader)
        assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b"HTTP/1.1 ") == 4
        assert answers.count(b'"chat.completion"') == 3


async def test_a_body_that_comes_after_such_a_wish_is_no_request() -> None:
    async with serving() as connect:
        reader, writer = await connect()
        head, _, body = chat(*UPGRADE, b"Expect: 100-continue").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await status_of(reader) == 100
        smuggled = GET + b"Connection: close\r\n\r\n"
        writer.write(smuggled.ljust(len(body)) + GET + b"Connection: close\r\n\r\n")
        answers = await rest_of(reader)
        assert answers.count(b"HTTP/1.1 400 ") == answers.count(b"HTTP/1.1 200 ") == 1


async def test_many_wishes_for_another_protocol_at_once_are_answered_in_turn() -> None:
    async with serving() as connect:
        reader, writer = await connect()
        wish = GET + b"\r\n".join(UPGRADE) + b"\r\n\r\n"
        writer.write(wish * 30 + GET + b"Connection: close\r\n\r\n")
        assert (await rest_of(reader)).count(b"HTTP/1.1 200 OK") == 31
        _, writer = await connect()
        writer.write(wish * 2000)  # more than wait, and than the interpreter's stack is deep
        reader, writer = await connect()
        writer.write(GET + b"Connection: close\r\n\r\n")
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 200 ")
