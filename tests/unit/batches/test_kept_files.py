"""Contents in a folder, stored responses, and the removal of what is no longer needed."""

import asyncio
import os
import resource
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alignedserve.batches.driver import ClockGain, collect_garbage, forget_input
from alignedserve.batches.location import DriverStores, stores_in
from alignedserve.batches.logic import CancelRequested, ValidationFailed, advance
from alignedserve.batches.records import BACKGROUND, BatchKey, BatchRecord, BatchStatus, FileId, Progress, api_owner
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.batches.responses import response_repository
from alignedserve.batches.responses.response_repository import ResponseRepository, StoredResponse
from alignedserve.batches.results import result_files
from alignedserve.batches.stores import disk_blobs
from alignedserve.batches.stores.disk_blobs import DiskBlobs
from alignedserve.batches.stores.sqlite_records import DAMAGED
from alignedserve.core.errors import StorageDamaged, StorageError
from alignedserve.disk.durable import write_all
from alignedserve.messages.state import Change, DeleteValue, SetValue
from tests.support.batch_samples import BATCH, INPUT, OUTPUT, batch_record, file_record
from tests.support.memory_records import MemoryRecords

DAY_S = 86_400.0


async def keep_blob(stores: DriverStores, file_id: FileId, *, is_committed: bool = True) -> None:
    writer = await stores.blobs.begin(file_id)
    await writer.write(b"{}")
    if is_committed:
        await writer.commit()


def make_old(folder: Path) -> None:
    for path in (folder / "files").iterdir():
        os.utime(path, (1.0, 1.0))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "files").iterdir())


async def add_batch(stores: DriverStores) -> BatchRecord:
    source = file_record()
    await stores.repository.add_file(source, fits=lambda _: True)
    record = batch_record()
    assert await stores.repository.add_batch(
        BatchSnapshot(record, Progress()), source, None, idempotency_key=None, key_lifetime_s=0.0
    )
    return record


async def test_the_input_of_another_api_goes_with_its_batch_whatever_its_owner_adds_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = api_owner("anyone", BACKGROUND)
    stores = stores_in(tmp_path, records := MemoryRecords())
    await stores.repository.add_file(file_record(owner=owner), fits=lambda _: True)
    await keep_blob(stores, INPUT)
    commits, num_added = records.commit, 0

    async def commit(changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        nonlocal num_added
        if num_added < 3 and DeleteValue(f"file/{INPUT}") in changes:
            num_added += 1
            other = file_record(file_id=FileId(f"file-{num_added:024x}"), owner=owner)
            await stores.repository.add_file(other, fits=lambda _: True)
        return await commits(changes, unchanged=unchanged)

    monkeypatch.setattr(records, "commit", commit)
    await forget_input(stores, batch_record(owner=owner, status=BatchStatus.COMPLETED), 10.0)
    assert names(tmp_path) == []
    assert (await stores.repository.stored_by(owner)).num_files == 3


async def test_contents_without_a_record_go_once_they_are_old(tmp_path: Path) -> None:
    stores = stores_in(tmp_path, MemoryRecords())
    await stores.repository.add_file(file_record(), fits=lambda _: True)
    await keep_blob(stores, INPUT)
    await keep_blob(stores, OUTPUT)
    await keep_blob(stores, FileId("file-" + "9" * 24), is_committed=False)
    await collect_garbage(stores, 10.0, batch_lifetime_s=DAY_S)
    assert len(names(tmp_path)) == 3
    make_old(tmp_path)
    await collect_garbage(stores, 10.0, batch_lifetime_s=DAY_S)
    assert names(tmp_path) == [INPUT]


async def test_a_folder_of_many_files_is_read_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's loop serves all gateways' records: 50 000 files would hold it up for two seconds a minute."""
    scan, read_by = os.scandir, set()

    def noting(folder: Path) -> Any:
        read_by.add(threading.current_thread())
        return scan(folder)

    monkeypatch.setattr(os, "scandir", noting)
    await collect_garbage(stores_in(tmp_path, MemoryRecords()), 10.0, batch_lifetime_s=DAY_S)
    assert read_by
    assert threading.current_thread() not in read_by


async def test_a_damaged_record_keeps_no_other_file_from_its_removal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = MemoryRecords()
    stores = stores_in(tmp_path, records)
    for file_id in (INPUT, OUTPUT):
        await stores.repository.add_file(file_record(file_id=file_id, expires_s=5.0), fits=lambda _: True)
        await keep_blob(stores, file_id)
    await records.commit([SetValue(f"file/{INPUT}", DAMAGED)], unchanged={})
    await collect_garbage(stores, 10.0, batch_lifetime_s=DAY_S)
    await collect_garbage(stores, 70.0, batch_lifetime_s=DAY_S)
    assert names(tmp_path) == [INPUT]
    assert caplog.text.count(f"{INPUT} is left out: ") == 1


async def test_a_clock_that_was_set_forward_makes_nothing_old(tmp_path: Path) -> None:
    stores = stores_in(tmp_path, MemoryRecords())
    clock, hour_s, began_s = ClockGain(), 3600.0, 1_000_000.0
    assert clock.look(began_s, 50.0) == 0.0
    expiring = msgspec.structs.replace(file_record(), expires_s=began_s + hour_s / 2)
    await stores.repository.add_file(expiring, fits=lambda _: True)
    await keep_blob(stores, INPUT)
    await keep_blob(stores, OUTPUT, is_committed=False)
    for path in (tmp_path / "files").iterdir():
        modified_s = path.stat().st_mtime - hour_s - 5.0  # as the clock that was set shows it
        os.utime(path, (modified_s, modified_s))
    gained_s = clock.look(began_s + hour_s + 10.0, 60.0)
    await collect_garbage(stores, began_s + hour_s + 10.0, batch_lifetime_s=DAY_S, clock_gained_s=gained_s)
    assert len(names(tmp_path)) == 2
    await collect_garbage(stores, began_s + hour_s + 10.0, batch_lifetime_s=DAY_S)
    assert names(tmp_path) == []


def test_a_clock_that_was_set_back_and_forward_has_gained_what_it_was_set_forward() -> None:
    clock = ClockGain()
    looks = [(1000.0, 0.0), (1100.0, 100.0), (-2400.0, 200.0), (1300.0, 300.0), (4900.0, 300.0)]
    assert [clock.look(*one) for one in looks] == [0.0, 0.0, 0.0, 3600.0, 7200.0]


async def end(stores: DriverStores, progress: Progress, at_s: float) -> None:
    await stores.repository.save_progress(BATCH, progress)
    files = result_files(batch_record(), progress, at_s + 2 * DAY_S)
    await stores.repository.change_batch(BATCH, lambda one: advance(one, ValidationFailed(()), at_s), files=files)


@pytest.mark.parametrize("num_bytes", [0, 10])
async def test_a_batch_is_forgotten_when_it_is_long_over_and_its_results_are_gone(
    tmp_path: Path, num_bytes: int
) -> None:
    stores = stores_in(tmp_path, MemoryRecords())
    await add_batch(stores)
    stores.logs.open(BATCH, 3)[0].close()
    await end(stores, Progress(output_bytes=num_bytes), at_s=100.0)
    await collect_garbage(stores, 100.0 + 0.9 * DAY_S, batch_lifetime_s=DAY_S)
    await collect_garbage(stores, 100.0 + 1.1 * DAY_S, batch_lifetime_s=DAY_S)
    assert (await stores.repository.batch(BATCH) is None) == (num_bytes == 0)
    await collect_garbage(stores, 100.0 + 2.1 * DAY_S, batch_lifetime_s=DAY_S)
    assert await stores.repository.batch(BATCH) is None
    assert await stores.repository.list_batches("anyone", after=None, limit=9) == ([], False)
    assert not list((tmp_path / "results").iterdir())


async def test_a_batch_that_runs_stays(tmp_path: Path) -> None:
    stores = stores_in(tmp_path, MemoryRecords())
    await add_batch(stores)
    await collect_garbage(stores, 1000 * DAY_S, batch_lifetime_s=DAY_S)
    assert await stores.repository.batch(BATCH) is not None


async def test_a_step_of_a_batch_that_has_vanished_is_an_error_of_the_tree(tmp_path: Path) -> None:
    stores = stores_in(tmp_path, MemoryRecords())
    with pytest.raises(StorageDamaged):
        await stores.repository.change_batch(BATCH, lambda one: advance(one, CancelRequested(), 1.0))


def test_when_a_batch_was_over() -> None:
    ended = [
        ("failed", "failed_s"),
        ("completed", "completed_s"),
        ("expired", "expired_s"),
        ("cancelled", "cancelled_s"),
    ]
    for status, name in ended:
        record = msgspec.structs.replace(batch_record(status=BatchStatus(status)), **{name: 7.0})
        assert record.over_s == 7.0


FILE = FileId("file-" + "0" * 24)


async def test_a_content_that_is_missing_is_damage(tmp_path: Path) -> None:
    with pytest.raises(StorageDamaged):
        await DiskBlobs(tmp_path).open(FILE)


async def test_an_upload_that_is_cancelled_writes_into_no_file_that_is_opened_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes is not cancelled, and the number of a file that was closed is the next one's."""
    is_writing, may_write = threading.Event(), threading.Event()

    def slowly(file_descriptor: int, content: bytes) -> None:
        is_writing.set()
        may_write.wait(10.0)
        write_all(file_descriptor, content)

    monkeypatch.setattr(disk_blobs, "write_all", slowly)
    writer = await DiskBlobs(tmp_path / "files").begin(INPUT)
    writing = asyncio.create_task(writer.write(b"of the upload"))
    await asyncio.to_thread(is_writing.wait, 10.0)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    discarding = asyncio.create_task(writer.discard())
    await asyncio.sleep(0.05)
    with (tmp_path / "other").open("wb"):
        may_write.set()
        await discarding
        await asyncio.sleep(0.05)
    assert (tmp_path / "other").read_bytes() == b""
    assert names(tmp_path) == []


async def test_a_content_that_cannot_be_opened_now_is_no_damage(tmp_path: Path) -> None:
    """A batch whose file is damaged fails for good; without file descriptors it only waits."""
    blobs = DiskBlobs(tmp_path)
    (tmp_path / FILE).write_bytes(b"{}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        with pytest.raises(StorageError) as refused:
            await blobs.open(FILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not isinstance(refused.value, StorageDamaged)
    reader = await blobs.open(FILE)
    assert reader.read_at(0, 10) == b"{}"
    reader.close()
    assert os.listdir(tmp_path) == [FILE]


NO_BOUND = 1 << 40


def record(number: int, owner: str = "me", size: int = 100, batch_id: BatchKey | None = None) -> StoredResponse:
    text = msgspec.Raw(b'"' + b"x" * size + b'"')
    return StoredResponse(
        response_id=f"resp_{number:032x}",
        owner=owner,
        created_s=float(number),
        expires_s=1000.0 + number,
        response=text,
        items=msgspec.Raw(b"[]"),
        batch_id=batch_id,
    )


async def found(repository: ResponseRepository, numbers: range, owner: str = "me") -> list[int]:
    records = await repository.find(owner, [record(number).response_id for number in numbers])
    return [number for number, one in zip(numbers, records, strict=True) if one is not None]


async def test_a_response_is_its_owners() -> None:
    repository = ResponseRepository(MemoryRecords())
    await repository.add(record(1), now=1.0, max_bytes=NO_BOUND)
    assert await repository.find("me", [record(1).response_id]) == [record(1)]
    assert await found(repository, range(1, 2), owner="you") == []


async def test_it_ends_with_its_lifetime() -> None:
    now = 0.0
    repository = ResponseRepository(MemoryRecords(clock=lambda: now))
    await repository.add(record(1), now=0.0, max_bytes=NO_BOUND)
    now = 1000.9
    assert await found(repository, range(1, 2)) == [1]
    now = 1001.1
    assert await found(repository, range(1, 2)) == []


@pytest.mark.parametrize("page", [2, 1000])
async def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    monkeypatch.setattr(response_repository, "_PAGE", page)
    store = MemoryRecords()
    repository = ResponseRepository(store)
    await repository.add(record(99, owner="you"), now=0.0, max_bytes=5000)
    for number in range(20):
        await repository.add(record(number, size=500), now=0.0, max_bytes=5000)
    kept = await found(repository, range(20))
    assert kept == list(range(20))[-len(kept) :]
    listed = await store.page("responses/me", after=None, limit=100, newest_first=False)
    assert listed is not None
    assert len(listed.members) == len(kept)
    assert 3 <= len(kept) <= 6
    assert await found(repository, range(99, 100), owner="you") == [99]


async def test_those_that_grow_make_the_oldest_give_way() -> None:
    """In the background a response is kept while it is still empty."""
    repository = ResponseRepository(MemoryRecords())
    for number in range(20):
        await repository.add(record(number, batch_id=BATCH), now=0.0, max_bytes=20_000)
    for number in range(20):
        await repository.settle(record(number, size=5000), now=0.0, max_bytes=20_000)
    kept = await found(repository, range(20))
    assert kept == list(range(20))[-len(kept) :]
    assert 2 <= len(kept) <= 4


async def test_one_that_is_larger_than_the_bound_is_not_kept() -> None:
    repository = ResponseRepository(MemoryRecords())
    await repository.add(record(1, size=5000), now=0.0, max_bytes=1000)
    assert await found(repository, range(1, 2)) == []


async def test_what_became_of_it_takes_its_place() -> None:
    store = MemoryRecords()
    repository = ResponseRepository(store)
    await repository.add(record(1, batch_id=BATCH), now=0.0, max_bytes=NO_BOUND)
    settled = await repository.settle(record(1, size=300), now=0.0, max_bytes=NO_BOUND)
    assert settled == record(1, size=300)
    assert await repository.settle(record(1), now=0.0, max_bytes=NO_BOUND) == settled  # another saw its files go
    listed = await store.page("responses/me", after=None, limit=10, newest_first=False)
    assert listed is not None
    assert len(listed.members) == 1
    await repository.remove(record(1))
    await repository.remove(record(1))
    await repository.settle(record(1), now=0.0, max_bytes=NO_BOUND)  # deleted ones do not come back
    assert await found(repository, range(1, 2)) == []
