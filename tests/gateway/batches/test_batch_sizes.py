"""Files at their real limits: 50 000 lines, 200 MB."""

import asyncio
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from alignedserve.batches.input_lines import InputFile
from alignedserve.batches.logic import Validated
from alignedserve.batches.records import Endpoint
from alignedserve.batches.stores.disk_blobs import DiskBlobs
from alignedserve.cli.batch.formatting import problem_text
from alignedserve.cli.batch.input_check import check_file
from alignedserve.config.sections import BatchesConfig
from tests.gateway.batches.batch_server import listening
from tests.gateway.batches.batch_support import batch_gateway, eventually
from tests.gateway.support import error_of
from tests.support.batch_samples import batch_record, chat_line, chat_lines

LIMITS = BatchesConfig()
_CHUNK = b"x" * 1_000_000
HEAD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)
TAIL = b"\r\n--b--\r\n"


@pytest.mark.slow
async def test_50_001_lines(tmp_path: Path) -> None:
    content = chat_lines(LIMITS.max_lines + 1)
    (tmp_path / "in.jsonl").write_bytes(content)
    [found] = check_file(tmp_path / "in.jsonl", Endpoint.CHAT, ("tiny",)).problems
    async with batch_gateway(tmp_path / "state") as served:
        done = await served.wait_for((await served.submit(content))["id"])
        assert not served.backend.submitted
    [problem] = done["errors"]["data"]
    assert (done["status"], problem["code"], problem["line"]) == ("failed", "too_many_requests", 50_001)
    assert (found.code, found.message, found.line) == (problem["code"], problem["message"], problem["line"])


def test_50_000_lines_are_fine(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(chat_lines(LIMITS.max_lines - 1) + chat_line("the last, without an end"))
    checked = check_file(tmp_path / "in.jsonl", Endpoint.CHAT, ("tiny",))
    assert checked == (LIMITS.max_lines, ())


def test_the_check_does_not_read_201_megabytes(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    os.truncate(tmp_path / "in.jsonl", 201_000_000)
    [problem] = check_file(tmp_path / "in.jsonl", Endpoint.CHAT, ("tiny",)).problems
    assert problem_text(msgspec.to_builtins(problem)) == "The file is larger than 200000000 bytes. (body_too_large)"


@pytest.mark.slow
async def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """The number of lines is the same, their length ten times as long."""
    peaks = [await peak_bytes(tmp_path, "x" * size) for size in (4_000, 40_000)]
    assert peaks[1] - peaks[0] < 2_000_000


async def peak_bytes(folder: Path, content: str) -> int:
    """Return the peak memory of reading and inspecting a file of 2 000 such lines: 8 or 80 MB."""
    blobs = DiskBlobs(folder)
    record = batch_record()
    writer = await blobs.begin(record.input_file_id)
    for number in range(2000):
        await writer.write(chat_line(f"line-{number}", content=content) + b"\n")
    await writer.commit()
    input_file = InputFile(record, blobs, LIMITS, ("tiny",))
    tracemalloc.start()
    try:
        async for _ in input_file.scan():
            pass
        assert input_file.validation() == Validated(2000, "tiny")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        await blobs.remove(record.input_file_id)


@pytest.mark.slow
@pytest.mark.parametrize("is_declared", [True, False])
async def test_201_megabytes(tmp_path: Path, is_declared: bool) -> None:
    """Refused at once where its length is declared, else at the first byte too many; nothing is left of it."""

    async def body() -> AsyncIterator[bytes]:
        yield HEAD
        for _ in range(201):
            yield _CHUNK
        yield TAIL

    headers = {"content-type": "multipart/form-data; boundary=b"}
    if is_declared:
        headers["content-length"] = str(len(HEAD) + 201 * len(_CHUNK) + len(TAIL))
    async with batch_gateway(tmp_path, is_driven=False) as served, listening(served.app) as url:
        async with httpx.AsyncClient(timeout=60.0) as client:
            answer = await client.post(f"{url}/v1/files", content=body(), headers=headers)
        assert error_of(answer, 413)["message"] == "The file is larger than 200000000 bytes."
        assert (await served.client.get("/v1/files")).json()["data"] == []
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.slow
async def test_200_megabytes_and_back(tmp_path: Path) -> None:
    size = LIMITS.max_file_bytes

    async def body() -> AsyncIterator[bytes]:
        yield HEAD
        for _ in range(size // len(_CHUNK)):
            yield _CHUNK
        yield TAIL

    headers = {"content-type": "multipart/form-data; boundary=b"}
    async with (
        batch_gateway(tmp_path, is_driven=False) as served,
        listening(served.app) as url,
        httpx.AsyncClient(base_url=url, timeout=60.0) as client,
    ):
        made = (await client.post("/v1/files", content=body(), headers=headers)).json()
        assert made["bytes"] == size
        last = await client.get(f"/v1/files/{made['id']}/content", headers={"range": f"bytes={size - 3}-"})
    assert last.content == b"xxx"


async def test_a_client_that_hangs_up_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served, listening(served.app) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(HEAD) + 10_000_000}\r\n"
        writer.write(head.encode() + b"content-type: multipart/form-data; boundary=b\r\n\r\n" + HEAD + _CHUNK)
        await writer.drain()

        async def has_begun() -> bool:
            return any((tmp_path / "files").iterdir())

        await eventually(has_begun)
        writer.transport.abort()

        async def is_gone() -> bool:
            return not any((tmp_path / "files").iterdir())

        await eventually(is_gone)
