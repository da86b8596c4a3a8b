"""The state server and gateways of other hosts: what fails, and what must never be let in."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import cast

import pytest
from typing_extensions import override

from alignedserve.api.errors import QuotaExceeded, Unavailable
from alignedserve.batches.location import stores_in
from alignedserve.batches.log.disk_log import LineOutcome, ResultRecord
from alignedserve.batches.records import FileId, ResultKind
from alignedserve.batches.remote import remote_stores, state_client
from alignedserve.batches.remote.remote_stores import RemoteBlobs, RemoteLogs, RemoteRecords
from alignedserve.batches.remote.state_client import StateClient
from alignedserve.core.errors import StorageError, StoreUnavailable
from alignedserve.gateway.quotas import OpenRequests, RequestQuotas, ShownLimits
from alignedserve.keys.entry import ANYONE, KeyEntry
from alignedserve.keys.open_counts import OpenPool
from alignedserve.keys.quotas import LEASE_S, QuotaPool
from alignedserve.messages.handshake import Role
from alignedserve.messages.state import (
    BeginUpload,
    Call,
    Done,
    QuotaAnswer,
    ReadContent,
    ReadResults,
    SetValue,
    UseQuota,
    WriteUpload,
)
from alignedserve.messages.state import ChunkRead as Chunk
from tests.support.batch_samples import BATCH
from tests.support.memory_records import MemoryRecords
from tests.support.servers.state_links import StateHosts, state_hosts
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

FILE = FileId("file-" + "a" * 24)
GATEWAYS = ("gateway-0", "gateway-1")


async def test_results_are_read_while_they_grow(tmp_path: Path) -> None:
    async with state_hosts(tmp_path) as hosts:
        log, _ = hosts.stores.logs.open(BATCH, 9)
        logs = RemoteLogs(hosts.client())

        async def results(start: int = 0) -> bytes:
            return b"".join([part async for part in logs.chunks(BATCH, ResultKind.OUTPUT, log.num_bytes, start)])

        assert await results() == b""
        log.append([ResultRecord(0, LineOutcome.COMPLETED, b"a" * 3_000_000)])
        log.append([ResultRecord(1, LineOutcome.FAILED, b"no"), ResultRecord(2, LineOutcome.COMPLETED, b"c")])
        assert await results() == b"a" * 3_000_000 + b"\nc\n"
        assert await results(2_999_999) == b"a\nc\n"
        log.close()
        await logs.remove(BATCH)
        assert await results() == b""


async def test_values_that_the_driver_could_not_store_are_shown(tmp_path: Path) -> None:
    async with state_hosts(tmp_path) as hosts:
        records, unsaved = RemoteRecords(hosts.client()), hosts.stores.repository.unsaved
        await records.commit([SetValue("a", b"1"), SetValue("b", b"2")], unchanged={})
        unsaved["b"] = b"3"
        assert await records.read(["a", "b"]) == [b"1", b"3"]
        del unsaved["b"]
        assert await records.read(["a", "b"]) == [b"1", b"2"]


async def test_a_server_that_goes_away_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with state_hosts(tmp_path) as hosts:
        client = hosts.client()
        await holds(client._is_linked.is_set)
        monkeypatch.setattr(state_client, "_LINK_S", 0.1)  # from now on: a first link may take longer
        records, blobs = RemoteRecords(client), RemoteBlobs(client)
        await records.commit([SetValue("a", b"1")], unchanged={})
        upload = await blobs.begin(FILE)
        await upload.write(b"half")
        await hosts.stop()
        with pytest.raises(StoreUnavailable):
            await records.read(["a"])
        with pytest.raises(StoreUnavailable):
            await upload.commit()
        await upload.discard()
        await hosts.start()
        await holds(client._is_linked.is_set)
        assert await records.read(["a"]) == [b"1"]
        with pytest.raises(StorageError):
            await upload.commit()
        await blobs.begin(FILE)  # nothing of the first upload is left


async def test_an_upload_of_a_lost_gateway_is_dropped(tmp_path: Path) -> None:
    async with state_hosts(tmp_path) as hosts:
        client = hosts.client()
        upload = await RemoteBlobs(client).begin(FILE)
        await upload.write(b"x" * 300_000)
        files = tmp_path / "state" / "files"
        assert len(list(files.iterdir())) == 1
        await client.close()
        await holds(lambda: not list(files.iterdir()))


async def test_a_download_reads_ahead_and_leaves_no_call(tmp_path: Path) -> None:
    async with state_hosts(tmp_path) as hosts:
        client = hosts.client()
        blobs, content = RemoteBlobs(client), os.urandom(4 * remote_stores._PART_BYTES)
        upload = await blobs.begin(FILE)
        await upload.write(content)
        await upload.commit()
        for start in (0, 1, remote_stores._PART_BYTES, len(content) - 1):
            assert b"".join([part async for part in blobs.chunks(FILE, start)]) == content[start:]
        async with aclosing(cast(AsyncGenerator[bytes, None], blobs.chunks(FILE))) as parts:
            assert await anext(parts) == content[: remote_stores._PART_BYTES]
            await holds(lambda: blobs._downloads._free._value == remote_stores._MAX_DOWNLOADS)  # those ahead have come
        assert not client._waiting
        reading = blobs.chunks(FILE)
        await anext(reading)
        await hosts.stop()
        with pytest.raises(StoreUnavailable):
            _ = [part async for part in reading]
        assert not client._waiting


async def test_of_more_calls_than_the_server_takes_at_once_none_is_refused(tmp_path: Path) -> None:
    async with state_hosts(tmp_path) as hosts:
        client = hosts.client()
        records, blobs = RemoteRecords(client), RemoteBlobs(client)
        await records.commit([SetValue("a", b"1")], unchanged={})
        begin = [blobs.begin(FileId(f"file-{number:024x}")) for number in range(remote_stores._MAX_CALLS - 50)]
        begun = asyncio.gather(*begin)
        found = await asyncio.gather(*(records.read(["a"]) for _ in range(remote_stores._MAX_CALLS + 50)))
        await begun
    assert all(values == [b"1"] for values in found)


async def test_a_new_process_gets_no_answer_to_a_call_of_the_old_one(tmp_path: Path) -> None:
    class SlowRecords(MemoryRecords):
        may_answer = asyncio.Event()

        @override
        async def read(self, keys: Sequence[str]) -> list[bytes | None]:
            if keys == ("slow",):
                await self.may_answer.wait()
            return [key.encode() for key in keys]

    records = SlowRecords()
    async with state_hosts(tmp_path, stores=stores_in(tmp_path / "state", records)) as hosts:
        first = hosts.client()
        asked = asyncio.create_task(RemoteRecords(first).read(["slow"]))
        await holds(lambda: bool(first._waiting))
        await asyncio.sleep(0.05)
        await first.close()
        with pytest.raises(StoreUnavailable):
            await asked
        second = RemoteRecords(hosts.client())
        asked = asyncio.create_task(second.read(["slow"]))
        await asyncio.sleep(0.1)
        records.may_answer.set()
        assert await asked == [b"slow"]
        assert await second.read(["quick"]) == [b"quick"]


@pytest.mark.parametrize(
    "call",
    [
        BeginUpload("../../etc/passwd"),
        WriteUpload(FILE, b"of no upload"),
        ReadContent("file-" + "A" * 24, 0, 1),
        ReadResults("batch_../x", True, 1, 0),
    ],
)
async def test_calls_for_what_is_no_id_are_refused(tmp_path: Path, call: Call) -> None:
    async with state_hosts(tmp_path) as hosts:
        client = hosts.client()
        with pytest.raises(StorageError):
            await client.call(call, Chunk)
        assert await client.call(BeginUpload(FILE), Done) == Done()


async def test_a_process_that_is_no_gateway_is_refused(tmp_path: Path) -> None:
    async with state_hosts(tmp_path) as hosts:
        worker = hosts.client("decode-0", Role.DECODE_WORKER)
        with pytest.raises(StoreUnavailable):
            await worker.call(BeginUpload(FILE), Done, timeout_s=1.0)
        assert await hosts.client().call(BeginUpload(FILE), Done) == Done()


# --- requests per minute


def quotas(
    hosts: StateHosts, name: str, limit: int, owners: Sequence[str] = GATEWAYS
) -> tuple[RequestQuotas, StateClient]:
    client = hosts.client(name)
    counted = RequestQuotas(limit, gateway=name, gateways=owners, client=client)
    counted.start()
    return counted, client


async def let_in(counted: RequestQuotas, num_requests: int) -> int:
    """Make these requests at once; return how many were let in."""
    results = await asyncio.gather(*(counted.count(ANYONE) for _ in range(num_requests)), return_exceptions=True)
    assert all(result is None or isinstance(result, QuotaExceeded) for result in results)
    return sum(result is None for result in results)


async def test_gateways_have_one_limit_together(tmp_path: Path) -> None:
    limit = 20
    async with state_hosts(tmp_path, quotas=QuotaPool()) as hosts:
        (first, _), (second, _) = (quotas(hosts, name, limit) for name in GATEWAYS)
        assert await let_in(first, 15) == 15
        began_s = time.monotonic()
        assert (
            sum(await asyncio.gather(let_in(second, 30), let_in(first, 30)))
            <= 5 + 1 + (time.monotonic() - began_s) * limit / 60
        )
        with pytest.raises(QuotaExceeded) as refused:
            await second.count(ANYONE)
        wait_s = refused.value.retry_after_s
        assert wait_s is not None
        assert 0.0 < wait_s <= 60.0 / limit
        first.stop()
        second.stop()


async def test_a_gateway_that_joins_has_the_whole_limit(tmp_path: Path) -> None:
    async with state_hosts(tmp_path, quotas=QuotaPool()) as hosts:
        joined, _ = quotas(hosts, GATEWAYS[1], 20, owners=GATEWAYS[:1])
        assert await let_in(joined, 15) == 15
        joined.stop()


async def test_a_count_that_is_not_kept_ends_in_the_own_share(tmp_path: Path) -> None:
    async with state_hosts(tmp_path, quotas=None) as hosts:
        client = hosts.client(GATEWAYS[0])
        with pytest.raises(StorageError):
            await client.call(UseQuota(0.0), QuotaAnswer)
        counted, _ = quotas(hosts, GATEWAYS[1], 20)
        async with asyncio.timeout(2 * LEASE_S):
            assert await let_in(counted, 20) == 10
        counted.stop()


async def test_counts_are_not_refused_for_calls_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_stores, "_MAX_CALLS", 0)
    async with state_hosts(tmp_path, quotas=QuotaPool()) as hosts:
        client = hosts.client(GATEWAYS[0])
        assert (await client.call(UseQuota(None), QuotaAnswer)).wait_s == 0.0
        with pytest.raises(StoreUnavailable):
            await client.call(BeginUpload(FILE), Done)


async def test_a_gateway_without_a_share_that_is_cut_off_says_so() -> None:
    joined = RequestQuotas(20, gateway="gateway-2", gateways=GATEWAYS)
    with pytest.raises(Unavailable, match="joined later"):
        await joined.count(ANYONE)


@pytest.mark.parametrize(("owners", "most"), [(GATEWAYS[:1], 10), (GATEWAYS, 0)])
async def test_a_server_that_is_away_costs_the_only_gateway_nothing(
    tmp_path: Path, owners: Sequence[str], most: int
) -> None:
    async with state_hosts(tmp_path, quotas=QuotaPool()) as hosts:
        counted, _ = quotas(hosts, GATEWAYS[0], 20, owners)
        assert await let_in(counted, 10) == 10
        await hosts.stop()
        assert await let_in(counted, 20) in (most, most + 1)
        await hosts.start(QuotaPool())
        shown = ShownLimits()
        with suppress(QuotaExceeded):
            await counted.count(ANYONE, shown)
        left = dict(shown.as_headers())[b"x-ratelimit-remaining-requests"]
        assert int(left) <= 10 - most + 2
        counted.stop()


# --- open requests

TEAM = KeyEntry("team-a", "key.team-a", open_requests=4)


def open_requests(hosts: StateHosts, name: str, process_id: str = "1") -> OpenRequests:
    opened = OpenRequests(name, GATEWAYS, process_id, hosts.client(name))
    opened.start()
    return opened


async def opened_now(opened: OpenRequests, num_requests: int, key: KeyEntry = TEAM) -> int:
    """Open these at once; return how many were let in."""
    results = await asyncio.gather(*(opened.open(key) for _ in range(num_requests)), return_exceptions=True)
    assert all(result is None or isinstance(result, QuotaExceeded) for result in results)
    return sum(result is None for result in results)


async def are_counted_together(late: OpenRequests) -> None:
    """Wait until a gateway without a part has the state server's answers again: each finds its own way back."""
    other = KeyEntry("team-b", "key.team-b", open_requests=1)
    async with asyncio.timeout(2 * LEASE_S):
        while True:
            with suppress(Unavailable):
                await late.open(other)
                late.close(other)
                return
            await asyncio.sleep(0.05)


async def test_open_requests_are_counted_together_of_late_gateways_too(tmp_path: Path) -> None:
    async with state_hosts(tmp_path, quotas=QuotaPool()) as hosts:
        first = open_requests(hosts, "gateway-0")
        assert await opened_now(first, 6) == 4  # all of it, not a part
        first.close(TEAM)
        late = open_requests(hosts, "gateway-7")
        await holds(lambda: hosts.open_requests.num_open(TEAM.owner, time.monotonic()) == 3)
        assert await opened_now(late, 3) == 1
        with pytest.raises(QuotaExceeded, match=r"key team-a on open_requests: Limit 4\.$"):
            await first.open(TEAM)
        for one in (first, late):
            one.stop()


async def test_what_a_gateway_had_open_ends_with_it(tmp_path: Path) -> None:
    async with state_hosts(tmp_path, quotas=QuotaPool()) as hosts:
        dying = open_requests(hosts, "gateway-0")
        assert await opened_now(dying, 4) == 4
        dying.stop()
        await hosts.clients[0].close()  # else it would take its link back, again and again
        again = open_requests(hosts, "gateway-0", process_id="2")
        assert await opened_now(again, 5) == 4
        again.stop()


async def test_a_gateway_that_is_cut_off_has_its_part(tmp_path: Path) -> None:
    async with state_hosts(tmp_path, quotas=QuotaPool()) as hosts:
        owner, late = open_requests(hosts, "gateway-0"), open_requests(hosts, "gateway-7")
        assert await opened_now(owner, 1) == 1
        await hosts.stop()
        async with asyncio.timeout(2 * LEASE_S):
            assert await opened_now(owner, 4) == 1  # two in all
            with pytest.raises(Unavailable, match="joined later"):
                await late.open(TEAM)
        hosts.open_requests = OpenPool(time.monotonic())
        await hosts.start(QuotaPool())
        await holds(lambda: hosts.open_requests.num_open(TEAM.owner, time.monotonic()) == 2)
        await are_counted_together(late)
        assert await opened_now(late, 3) == 2
        for one in (owner, late):
            one.stop()
