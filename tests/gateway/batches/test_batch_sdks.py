"""OpenAI's own SDKs, unchanged, and every answer that they get.

`batch_transcript.jsonl` is what went over the wire, ids and times made alike: Python's SDK and Node's make it byte for
byte. After a change that is meant to show there: `python -m tests.gateway.batches.test_batch_sdks`.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from alignedserve.core.request import Request
from tests.gateway.batches.batch_server import Recorder, listening, transcript
from tests.gateway.batches.batch_support import batch_gateway
from tests.gateway.completions.test_conformance import validator
from tests.gateway.support import EOS, tokens_of
from tests.harnesses.scripted_backend import Script
from tests.support.batch_samples import chat_line, chat_lines

STORED = Path(__file__).with_name("batch_transcript.jsonl")
NODE_SDK = "openai@6.49.0"
ENDPOINT: Any = "/v1/chat/completions"


def write_inputs(folder: Path) -> None:
    good = [chat_line("a"), chat_line("wrong", n=0), chat_line("b")]
    (folder / "good.jsonl").write_bytes(b"\n".join(good) + b"\n")
    (folder / "bad.jsonl").write_bytes(chat_line("a") + b"\n{\n" + chat_line("a"))
    (folder / "slow.jsonl").write_bytes(chat_lines(2, max_tokens=7))


def answer(request: Request) -> Script:
    is_slow = request.sampling.max_tokens == 7
    return Script((*tokens_of("hello world"), EOS), first_token_delay_s=60.0 if is_slow else 0.0)


@asynccontextmanager
async def recorded(folder: Path) -> AsyncIterator[tuple[str, Recorder]]:
    write_inputs(folder)
    async with batch_gateway(folder / "state", answer, api_keys=("mine",), max_in_flight=1) as served:
        recorder = Recorder(served.app)
        async with listening(recorder) as url:
            yield url, recorder


class Session:
    """Steps of a user of the Python SDK."""

    def __init__(self, client: Any, folder: Path) -> None:
        self._client = client
        self._folder = folder

    async def upload(self, name: str) -> Any:
        return await self._client.files.create(file=self._folder / name, purpose="batch")

    async def create(self, file: Any, **fields: Any) -> Any:
        asked = {"endpoint": ENDPOINT, "completion_window": "24h"} | fields
        return await self._client.batches.create(input_file_id=file.id, **asked)

    async def until(self, batch: Any, *states: str) -> Any:
        while batch.status not in states:
            await asyncio.sleep(0.02)
            batch = await self._client.batches.retrieve(batch.id)
        return batch

    async def run(self) -> None:
        client = self._client
        file = await self.upload("good.jsonl")
        assert (await client.files.retrieve(file.id)).filename == "good.jsonl"
        assert (await client.files.content(file.id)).content == (self._folder / "good.jsonl").read_bytes()
        done = await self.until(await self.create(file, metadata={"team": "a"}), "completed")
        assert (done.request_counts.completed, done.request_counts.failed, done.metadata) == (2, 1, {"team": "a"})
        assert (await client.files.content(done.output_file_id)).text.count("\n") == 2
        assert json.loads((await client.files.content(done.error_file_id)).text)["custom_id"] == "wrong"
        bad = await self.until(await self.create(await self.upload("bad.jsonl")), "failed")
        assert [error.line for error in bad.errors.data] == [2, 3]
        slow = await self.until(await self.create(await self.upload("slow.jsonl")), "in_progress")
        assert (await client.batches.cancel(slow.id)).status == "cancelling"
        cancelled = await self.until(await client.batches.retrieve(slow.id), "cancelled")
        assert [one.id async for one in client.batches.list(limit=1)] == [slow.id, bad.id, done.id]
        assert len([one async for one in client.files.list(limit=2, purpose="batch")]) == 3
        await self.be_refused(file, cancelled)

    async def be_refused(self, file: Any, cancelled: Any) -> None:
        import openai

        client = self._client
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(cancelled.id)
        with pytest.raises(openai.BadRequestError):
            await self.create(file, endpoint="/v1/moderations")
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        with pytest.raises(openai.NotFoundError):
            await self.create(file)


async def python_transcript(folder: Path) -> str:
    import openai

    async with (
        recorded(folder) as (url, recorder),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="mine", max_retries=0) as client,
    ):
        await Session(client, folder).run()
    return transcript(recorder.exchanges)


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_whoever_lists_files_may_delete_what_it_has_seen(tmp_path: Path, order: Any) -> None:
    import openai

    async with batch_gateway(tmp_path, is_driven=False) as served, listening(served.app) as url:
        made = [(await served.upload(b"x")).json()["id"] for _ in range(7)]
        seen: list[str] = []
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            async for file in client.files.list(limit=2, order=order):
                seen.append(file.id)
                if file.id != made[3]:
                    await client.files.delete(file.id)
            left = [file.id async for file in client.files.list()]
    assert seen == (made if order == "asc" else made[::-1])
    assert left == [made[3]]


async def test_the_python_sdk(tmp_path: Path) -> None:
    assert await python_transcript(tmp_path) == STORED.read_text(encoding="utf-8")


@pytest.mark.slow
async def test_the_node_sdk(tmp_path: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    install = ("npm", "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), NODE_SDK)
    try:
        failure = await _run(*install)
    except TimeoutError:
        failure = "its registry does not answer"
    if failure is not None:
        pytest.skip(f"npm cannot install {NODE_SDK}: {failure[-200:]}")
    shutil.copy(Path(__file__).with_name("sdk_batches.mjs"), tmp_path)
    async with recorded(tmp_path) as (url, recorder):
        failure = await _run("node", str(tmp_path / "sdk_batches.mjs"), url, str(tmp_path))
    assert failure is None, failure
    assert transcript(recorder.exchanges) == STORED.read_text(encoding="utf-8")


async def _run(*command: str) -> str | None:
    """Return the output of the command if it failed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdout=pipe, stderr=asyncio.subprocess.STDOUT, start_new_session=True
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), 90)
    finally:
        if process.returncode is None:  # it and what it has started, which would keep its output open
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
    return None if process.returncode == 0 else said.decode()


def schema_of(exchange: dict[str, Any]) -> str:
    """Return OpenAI's name for this answer."""
    path = exchange["request"].partition(" ")[2].partition("?")[0]
    is_list = exchange["request"].startswith("GET") and path in ("/v1/files", "/v1/batches")
    if exchange["status"] != 200:
        return "ErrorResponse"
    if exchange["request"].startswith("DELETE"):
        return "DeleteFileResponse"
    if is_list:
        return "ListFilesResponse" if path == "/v1/files" else "ListBatchesResponse"
    return "OpenAIFile" if path.startswith("/v1/files") else "Batch"


def test_every_answer_is_as_described() -> None:
    exchanges = [json.loads(line) for line in STORED.read_text(encoding="utf-8").splitlines()]
    seen = set()
    for exchange in exchanges:
        if exchange["request"].endswith("/content"):
            for line in exchange["answer"]:
                name = "BatchRequestOutput" if "response" in line else "BatchRequestInput"
                validator(name).validate(line)
                seen.add(name)
            continue
        seen.add(schema_of(exchange))
        validator(schema_of(exchange)).validate(exchange["answer"])
    assert len(seen) == 8


OURS = {"Batch": {"alignedserve"}, "OpenAIFile": set()}


def test_nothing_is_told_that_is_not_described() -> None:
    """Beside our one namespaced key every member is OpenAI's; those that are not set are left out, never null."""
    for line in STORED.read_text(encoding="utf-8").splitlines():
        exchange = json.loads(line)
        if exchange["status"] != 200 or exchange["request"].endswith("/content"):
            continue
        for one in exchange["answer"].get("data", [exchange["answer"]]):
            name = {"batch": "Batch", "file": "OpenAIFile"}[one["object"]]
            described = validator(name).schema["components"]["schemas"][name]["properties"]
            assert one.keys() <= described.keys() | OURS[name] | ({"deleted"} if "deleted" in one else set())
            assert [member for member, value in one.items() if value is None and member != "metadata"] == []


async def test_empty_lists(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        validator("ListFilesResponse").validate((await served.client.get("/v1/files")).json())
        validator("ListBatchesResponse").validate((await served.client.get("/v1/batches")).json())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        STORED.write_text(asyncio.run(python_transcript(Path(scratch))), encoding="utf-8")
    sys.exit(0)
