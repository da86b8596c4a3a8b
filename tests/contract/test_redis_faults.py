"""The record store in a Redis that is stopped, killed, or whose answers are lost."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from alignedserve.batches.stores import redis_location
from alignedserve.batches.stores.redis_location import RedisLocation
from alignedserve.batches.stores.redis_records import RedisRecords
from alignedserve.core.errors import StoreUnavailable
from alignedserve.messages.state import SetValue
from tests.support.servers.valkey import ValkeyServer

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def stored(server: ValkeyServer, address: str | None = None) -> AsyncIterator[RedisRecords]:
    server.start()
    records = RedisRecords(RedisLocation(address) if address else server.location, namespace="test")
    try:
        yield records
    finally:
        await records.close()
        server.kill()


@contextlib.asynccontextmanager
async def losing_answers_to_exec(server_path: Path, path: Path) -> AsyncIterator[None]:
    """Open a way to the server that hangs up once it has passed on an EXEC, and before the answer to it."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_unix_connection(str(server_path))
        try:
            while asked := await reader.read(1 << 16):
                there.write(asked)
                answer = await there_reader.read(1 << 16)
                if b"EXEC" in asked:
                    return
                writer.write(answer)
        finally:
            writer.close()
            there.close()

    async with await asyncio.start_unix_server(forward, str(path)):
        yield


async def test_a_commit_whose_answer_is_lost_is_not_said_to_have_failed(tmp_path: Path) -> None:
    """It is done, and False would say that nothing was."""
    server, way = ValkeyServer(tmp_path), tmp_path / "way.sock"
    async with losing_answers_to_exec(server.socket_path, way), stored(server, f"unix://{way}") as records:
        with pytest.raises(StoreUnavailable):
            await records.commit([SetValue("a", b"1")], unchanged={"a": None})
        assert await records.read(["a"]) == [b"1"]


async def test_a_stopped_server_is_given_up_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_location, "TIMEOUT_S", 0.3)
    server = ValkeyServer(tmp_path)
    async with stored(server) as records:
        await records.commit([SetValue("a", b"1")], unchanged={})
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        process.suspend()
        try:
            began_s = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await records.read(["a"])
            with pytest.raises(StoreUnavailable):
                await records.commit([SetValue("a", b"2")], unchanged={"a": b"1"})
            assert time.monotonic() - began_s < 15.0
        finally:
            process.resume()
        assert await records.read(["a"]) in ([b"1"], [b"2"])


async def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    async with stored(server) as records:
        for number in range(50):
            await records.commit([SetValue(f"key-{number}", b"kept")], unchanged={})
        server.kill()
        with pytest.raises(StoreUnavailable):
            await records.read(["key-0"])
        server.start()
        assert await records.read([f"key-{number}" for number in range(50)]) == [b"kept"] * 50
