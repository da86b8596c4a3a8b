"""Heads that clients seldom send, over raw connections to a real server: none ends it, or is taken for another."""

import json

from tests.gateway.connections.test_limits import rest_of, serving
from tests.support.marks import each


@each("target", [b"CONNECT a:1", b"GET http://x", b"GET http://[x/"], ids=repr)
async def test_a_target_that_cannot_be_read_is_refused(target: bytes) -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await rest_of(reader)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
