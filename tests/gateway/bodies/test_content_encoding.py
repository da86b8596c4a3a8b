"""Compressed bodies."""

import asyncio
import gzip
import json
import threading

import msgspec

from alignedserve.keys.file import KeyRow, ring_of
from alignedserve.keys.ring import digest_of
from tests.gateway.support import Gateway, error_of, gateway
from tests.support.marks import each

BODY = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2}).encode()
JSON = {"content-type": "application/json"}


async def test_gzip_is_read(served: Gateway) -> None:
    for encoding, body in (("gzip", gzip.compress(BODY)), ("identity", BODY), ("GZIP", gzip.compress(BODY))):
        headers = JSON | {"content-encoding": encoding}
        answer = await served.client.post("/v1/completions", content=body, headers=headers)
        assert answer.json()["choices"][0]["text"] == "hello world"[:5] + " world"


@each(
    ("encoding", "body", "status", "code"),
    [
        ("gzip", BODY, 400, "invalid_encoding"),
        ("gzip", gzip.compress(BODY)[:-4], 400, "invalid_encoding"),
        ("gzip", gzip.compress(BODY) * 2, 400, "invalid_encoding"),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY)), 415, "unsupported_media_type"),
        ("br", b"", 415, "unsupported_media_type"),
    ],
    ids=["plain", "cut", "two members", "twice", "another"],
)
async def test_what_is_refused(encoding: str, body: bytes, status: int, code: str) -> None:
    async with gateway() as served:
        headers = JSON | {"content-encoding": encoding}
        answer = await served.client.post("/v1/completions", content=body, headers=headers)
        assert error_of(answer, status)["code"] == code


async def test_a_bomb_is_refused() -> None:
    bomb = gzip.compress(b'{"model": "tiny", "prompt": "' + b" " * (64 << 20))
    async with gateway() as served:
        answer = await served.client.post("/v1/completions", content=bomb, headers=JSON | {"content-encoding": "gzip"})
        assert error_of(answer, 413)["code"] == "body_too_large"


async def test_those_of_a_key_for_documents_wait_in_the_queue_of_documents() -> None:
    goes_on = threading.Event()
    row = {"name": "batch", "secrets": [{"sha256": digest_of("documents").hex()}], "tiers": ["flex"]}
    headers = JSON | {"content-encoding": "gzip", "authorization": "Bearer documents"}
    async with gateway() as served:
        served.services.keys.ring = ring_of((), [msgspec.convert(row, KeyRow)])
        chats = [asyncio.create_task(served.services.lanes.run(10_000, goes_on.wait)) for _ in range(64)]
        await asyncio.sleep(0)
        post = served.client.post("/v1/completions", content=gzip.compress(BODY), headers=headers)
        document = asyncio.create_task(post)
        for _ in range(20):  # until it waits
            await asyncio.sleep(0)
        goes_on.set()
        assert (await document).status_code == 200
        assert all(await asyncio.gather(*chats))


async def test_files_are_sent_plain(served: Gateway) -> None:
    headers = {"content-encoding": "gzip", "content-type": "multipart/form-data; boundary=x"}
    answer = await served.client.post("/v1/files", content=b"", headers=headers)
    assert answer.status_code in (404, 415)
