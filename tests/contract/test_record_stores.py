"""Every record store keeps the same promises: in this process, and in a real Redis that is killed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from alignedserve.batches.interfaces import RecordStore
from alignedserve.batches.remote.remote_stores import RemoteRecords
from alignedserve.batches.stores.memory_records import MemoryRecords
from alignedserve.batches.stores.redis_records import RedisRecords
from alignedserve.cluster.private_redis import PrivateRedis
from alignedserve.core.errors import StoreUnavailable
from alignedserve.messages.state import AddToIndex, DeleteValue, RemoveFromIndex, SetValue
from tests.support.state_links import state_hosts

pytestmark = pytest.mark.slow


def private_redis(folder: Path) -> PrivateRedis:
    return PrivateRedis(folder=folder / "data", socket_path=folder / "redis.sock", log_path=folder / "redis.log")


@pytest.fixture(params=["memory", "redis", "head"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RecordStore]:
    if request.param == "memory":
        yield MemoryRecords()
        return
    if request.param == "head":
        async with state_hosts(tmp_path) as hosts:
            yield RemoteRecords(hosts.client())
        return
    server = private_redis(tmp_path)
    server.start()
    records = RedisRecords(server.location, namespace="test")
    try:
        yield records
    finally:
        await records.close()
        server.stop()


async def test_values_come_back(store: RecordStore) -> None:
    assert await store.commit([SetValue("a", b"1"), SetValue("b", b"\x00\xff")], unchanged={})
    assert await store.read(["b", "none", "a"]) == [b"\x00\xff", None, b"1"]
    assert await store.commit([DeleteValue("a"), DeleteValue("none")], unchanged={})
    assert await store.read(["a"]) == [None]
    assert await store.read([]) == []


async def test_all_or_nothing_by_what_was_seen(store: RecordStore) -> None:
    assert await store.commit([SetValue("a", b"1")], unchanged={"a": None})
    assert not await store.commit([SetValue("a", b"2"), SetValue("b", b"2")], unchanged={"a": None})
    assert not await store.commit([SetValue("a", b"2"), SetValue("b", b"2")], unchanged={"a": b"0"})
    assert await store.read(["a", "b"]) == [b"1", None]
    assert await store.commit([SetValue("a", b"2"), SetValue("b", b"2")], unchanged={"a": b"1", "b": None})
    assert await store.read(["a", "b"]) == [b"2", b"2"]


async def test_of_many_writers_at_once_one_wins(store: RecordStore) -> None:
    won = await asyncio.gather(*(store.commit([SetValue("a", b"%d" % n)], unchanged={"a": None}) for n in range(20)))
    assert won.count(True) == 1
    assert await store.read(["a"]) == [b"%d" % won.index(True)]


async def test_values_have_lifetimes(store: RecordStore) -> None:
    await store.commit(
        [SetValue("short", b"1", lifetime_s=0.05), SetValue("long", b"1", lifetime_s=60.0)], unchanged={}
    )
    await asyncio.sleep(0.1)
    assert await store.read(["short", "long"]) == [None, b"1"]


async def test_lists_are_ordered_and_paged(store: RecordStore) -> None:
    members = [("c", 1.0), ("a", 2.0), ("b", 2.0), ("d", 3.0)]
    await store.commit([AddToIndex("list", member, score) for member, score in reversed(members)], unchanged={})

    async def walk(newest_first: bool) -> list[str]:
        found: list[str] = []
        has_more = True
        while has_more:
            after = found[-1] if found else None
            page = await store.page("list", after=after, limit=2, newest_first=newest_first)
            assert page is not None
            found += page.members
            has_more = page.has_more
        return found

    assert await walk(newest_first=False) == ["c", "a", "b", "d"]
    assert await walk(newest_first=True) == ["d", "b", "a", "c"]
    await store.commit(
        [RemoveFromIndex("list", "a"), RemoveFromIndex("list", "none"), AddToIndex("list", "c", 9.0)], unchanged={}
    )
    assert await walk(newest_first=False) == ["b", "d", "c"]
    assert await store.page("list", after="a", limit=2, newest_first=False) is None
    empty = await store.page("nothing", after=None, limit=2, newest_first=False)
    assert empty is not None
    assert (empty.members, empty.has_more) == ((), False)


async def _answers(records: RedisRecords) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await records.read(["x"])
            except StoreUnavailable:
                await asyncio.sleep(0.05)
            else:
                return


def _server_process(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "data" / "redis.pid").read_text()))


async def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path) -> None:
    server = private_redis(tmp_path)
    server.start()
    records = RedisRecords(server.location, namespace="test")
    try:
        for number in range(50):
            await records.commit([SetValue(f"key-{number}", b"kept")], unchanged={})
        _server_process(tmp_path).kill()
        with pytest.raises(StoreUnavailable):
            await records.read(["key-0"])
        await _answers(records)
        assert await records.read([f"key-{number}" for number in range(50)]) == [b"kept"] * 50
    finally:
        await records.close()
        server.stop()


async def test_data_outlives_a_restart_and_an_orphan_is_ended(tmp_path: Path) -> None:
    first = private_redis(tmp_path)
    first.start()
    records = RedisRecords(first.location, namespace="test")
    await records.commit([SetValue("a", b"1")], unchanged={})
    await records.close()
    orphan = _server_process(tmp_path)
    first._is_stopping.set()  # as when its cluster is killed: it keeps running, and is not restarted
    second = private_redis(tmp_path)
    second.start()
    records = RedisRecords(second.location, namespace="test")
    try:
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
        assert await records.read(["a"]) == [b"1"]
    finally:
        await records.close()
        second.stop()
        first.stop()


async def test_no_scripts_and_no_administration(tmp_path: Path) -> None:
    server = private_redis(tmp_path)
    server.start()
    records = RedisRecords(server.location, namespace="test")
    try:
        for command in (("EVAL", "return 1", "0"), ("CONFIG", "GET", "dir"), ("FLUSHALL",), ("DEBUG", "SLEEP", "0")):
            with pytest.raises(StoreUnavailable):
                await records._send(records._client.execute_command(*command))
    finally:
        await records.close()
        server.stop()
