"""Every record store keeps the same promises: in memory, in a file, in a real Redis, and over a link."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from alignedserve.batches.interfaces import RecordStore
from alignedserve.batches.location import stores_in
from alignedserve.batches.remote.remote_stores import RemoteRecords
from alignedserve.messages.state import AddToIndex, DeleteValue, RemoveFromIndex, SetValue
from tests.contract.test_redis_faults import stored
from tests.contract.test_sqlite_faults import opened
from tests.support.memory_records import MemoryRecords
from tests.support.servers.state_links import state_hosts
from tests.support.servers.valkey import ValkeyServer

pytestmark = pytest.mark.slow


@pytest.fixture(params=["memory", "file", "redis", "head", "file of the head"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RecordStore]:
    if request.param == "memory":
        yield MemoryRecords()
        return
    if request.param == "head":
        async with state_hosts(tmp_path) as hosts:
            yield RemoteRecords(hosts.client())
        return
    if request.param == "redis":
        async with stored(ValkeyServer(tmp_path)) as records:
            yield records
        return
    async with opened(tmp_path / "records.db") as in_file:
        if request.param == "file":
            yield in_file
            return
        async with state_hosts(tmp_path, stores=stores_in(tmp_path / "state", in_file)) as hosts:
            yield RemoteRecords(hosts.client())


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
