"""The record store in Redis when the server is stopped, its answers are lost, or its file was torn."""

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from alignedserve.batches.records import Progress
from alignedserve.batches.repository import BatchRepository, BatchSnapshot
from alignedserve.batches.stores import redis_records
from alignedserve.batches.stores.redis_records import RedisLocation, RedisRecords
from alignedserve.cluster.private_redis import PrivateRedis
from alignedserve.core.errors import ResourceError, StorageDamaged, StoreUnavailable
from alignedserve.messages.state import SetValue
from tests.support.batch_samples import BATCH, batch_record, file_record
from tests.support.waiting import holds

pytestmark = pytest.mark.slow


def private_redis(folder: Path) -> PrivateRedis:
    return PrivateRedis(folder=folder / "data", socket_path=folder / "redis.sock", log_path=folder / "redis.log")


@contextlib.asynccontextmanager
async def stored(folder: Path, address: str | None = None) -> AsyncIterator[RedisRecords]:
    server = private_redis(folder)
    server.start()
    records = RedisRecords(RedisLocation(address) if address else server.location, namespace="test")
    try:
        yield records
    finally:
        await records.close()
        server.stop()


def server_pid(folder: Path) -> int:
    return int((folder / "data" / "redis.pid").read_text() or 0)


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
    way = tmp_path / "way.sock"
    async with (
        losing_answers_to_exec(tmp_path / "redis.sock", way),
        stored(tmp_path, f"unix://{way}") as records,
    ):
        with pytest.raises(StoreUnavailable):
            await records.commit([SetValue("a", b"1")], unchanged={"a": None})
        assert await records.read(["a"]) == [b"1"]


async def test_a_stopped_server_is_given_up_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_records, "_TIMEOUT_S", 0.3)
    async with stored(tmp_path) as records:
        await records.commit([SetValue("a", b"1")], unchanged={})
        server = psutil.Process(server_pid(tmp_path))
        server.suspend()
        try:
            began_s = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await records.read(["a"])
            with pytest.raises(StoreUnavailable):
                await records.commit([SetValue("a", b"2")], unchanged={"a": b"1"})
            assert time.monotonic() - began_s < 15.0
        finally:
            server.resume()
        assert await records.read(["a"]) in ([b"1"], [b"2"])


async def test_a_torn_end_of_the_file_costs_only_what_was_not_acknowledged(tmp_path: Path) -> None:
    async with stored(tmp_path) as records:
        for number in range(20):
            await records.commit([SetValue(f"key-{number}", b"x" * 100)], unchanged={})
    kept = max((tmp_path / "data").rglob("*appendonly*"), key=lambda path: path.stat().st_size)
    os.truncate(kept, kept.stat().st_size - 7)
    async with stored(tmp_path) as records:
        found = await records.read([f"key-{number}" for number in range(20)])
        assert found[:19] == [b"x" * 100] * 19


async def test_damage_in_the_middle_of_the_file_is_refused_and_told_how_to_repair(tmp_path: Path) -> None:
    async with stored(tmp_path) as records:
        for number in range(20):
            await records.commit([SetValue(f"key-{number}", b"x" * 100)], unchanged={})
    kept = max((tmp_path / "data").rglob("*appendonly*"), key=lambda path: path.stat().st_size)
    content = bytearray(kept.read_bytes())
    place = content.index(b"*", len(content) // 2)
    content[place : place + 2] = b"??"
    kept.write_bytes(content)
    with pytest.raises(ResourceError, match=f"{kept.name} is damaged.*docs/batches.md") as refused:
        private_redis(tmp_path).start()
    assert kept.read_bytes() == content
    repair = str(refused.value).partition("made: ")[2]
    process = await asyncio.create_subprocess_exec("bash", "-c", repair, stdin=PIPE, stdout=PIPE)
    await process.communicate(b"y\n")
    async with stored(tmp_path) as records:
        found = await records.read([f"key-{number}" for number in range(20)])
    num_kept = found.index(None)
    assert 5 <= num_kept < 15
    assert found[:num_kept] == [b"x" * 100] * num_kept


async def test_damage_in_a_value_is_found_by_who_reads_it(tmp_path: Path) -> None:
    """Redis starts with it: its file has no checksums."""
    async with stored(tmp_path) as records:
        whole = BatchSnapshot(batch_record(), Progress(log_bytes=77))
        await BatchRepository(records).add_file(file_record(), fits=lambda _: True)
        assert await BatchRepository(records).add_batch(whole, file_record(), idempotency_key=None, key_lifetime_s=0.0)
    kept = max((tmp_path / "data").rglob("*appendonly*"), key=lambda path: path.stat().st_size)
    content = kept.read_bytes()
    assert content.count(b'{"log_bytes"') == 1
    kept.write_bytes(content.replace(b'{"log_bytes"', b'?"log_bytes"'))
    async with stored(tmp_path) as records:
        assert await BatchRepository(records).active_batches() == [BatchSnapshot(whole.record, Progress())]
        with pytest.raises(StorageDamaged):
            await BatchRepository(records).batch(BATCH)


async def test_a_server_that_stays_silent_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.cluster.private_redis._SILENCE_S", 1.0)
    async with stored(tmp_path) as records:
        await records.commit([SetValue("a", b"1")], unchanged={})
        stopped = server_pid(tmp_path)
        os.kill(stopped, signal.SIGSTOP)
        await holds(lambda: server_pid(tmp_path) not in (stopped, 0))
        await answers(records)
        assert await records.read(["a"]) == [b"1"]


async def answers(records: RedisRecords) -> None:
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(StoreUnavailable):
                await records.read(["a"])
                return
            await asyncio.sleep(0.05)


async def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path) -> None:
    async with stored(tmp_path) as records:
        for number in range(50):
            await records.commit([SetValue(f"key-{number}", b"kept")], unchanged={})
        psutil.Process(server_pid(tmp_path)).kill()
        with pytest.raises(StoreUnavailable):
            await records.read(["key-0"])
        await answers(records)
        assert await records.read([f"key-{number}" for number in range(50)]) == [b"kept"] * 50


async def test_data_outlives_a_restart_and_an_orphan_is_ended(tmp_path: Path) -> None:
    first = private_redis(tmp_path)
    first.start()
    records = RedisRecords(first.location, namespace="test")
    await records.commit([SetValue("a", b"1")], unchanged={})
    await records.close()
    orphan = psutil.Process(server_pid(tmp_path))
    first._is_stopping.set()  # as when its cluster is killed: it keeps running, and is not restarted
    async with stored(tmp_path) as records:
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
        assert await records.read(["a"]) == [b"1"]
    first.stop()


async def test_no_scripts_and_no_administration(tmp_path: Path) -> None:
    async with stored(tmp_path) as records:
        for command in (("EVAL", "return 1", "0"), ("CONFIG", "GET", "dir"), ("FLUSHALL",), ("DEBUG", "SLEEP", "0")):
            with pytest.raises(StoreUnavailable):
                await records._send(records._client.execute_command(*command))
