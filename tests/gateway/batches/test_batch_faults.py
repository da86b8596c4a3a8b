"""Batches and files when what is stored cannot be read for a while, or the store's answer is lost."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import override

from alignedserve.batches import driver, line_tracker, run
from alignedserve.batches.log.disk_log import DiskLog, ResultRecord
from alignedserve.batches.records import BatchRecord, BatchStatus, FileId, decode
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.config.sections import BatchesConfig
from alignedserve.core.errors import StorageError, StorageFull, StoreFull, StoreUnavailable
from alignedserve.core.request import Request
from alignedserve.messages.state import Change, SetValue
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway, eventually, slowly
from tests.gateway.support import error_of, saying
from tests.harnesses.scripted_backend import Script
from tests.support.batch_samples import chat_lines
from tests.support.marks import each
from tests.support.memory_records import MemoryRecords

pytestmark = pytest.mark.slow


async def test_a_validation_that_cannot_read_pauses_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_RESTART_S", 0.1)
    async with batch_gateway(tmp_path, is_driven=False) as served:
        whole = served.stores.blobs.chunks

        async def chunks(file_id: FileId, start: int = 0) -> AsyncIterator[bytes]:
            raise StorageError("the disk does not answer")
            yield b""

        monkeypatch.setattr(served.stores.blobs, "chunks", chunks)
        made = await served.submit(chat_lines(2))
        served.start_driver()

        async def is_paused() -> bool:
            return bool((await served.batch(made["id"]))["alignedserve"]["paused"] == "the disk does not answer")

        await eventually(is_paused)
        assert (await served.batch(made["id"]))["status"] == "validating"
        monkeypatch.setattr(served.stores.blobs, "chunks", whole)
        done = await served.wait_for(made["id"])
    assert (done["status"], done["alignedserve"]["paused"]) == ("completed", None)


async def test_an_upload_whose_record_may_be_kept_keeps_its_content(
    undriven: BatchGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store had it, and its answer was lost: a record without content would be a lie."""
    commit = undriven.records.commit

    async def losing(changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        await commit(changes, unchanged=unchanged)
        raise StoreUnavailable("lost")

    monkeypatch.setattr(undriven.records, "commit", losing)
    assert (await undriven.upload(chat_lines(1))).status_code == 503
    monkeypatch.undo()
    listed: dict[str, Any] = (await undriven.client.get("/v1/files")).json()
    assert [await undriven.results(file["id"]) for file in listed["data"]] == [chat_lines(1).decode().splitlines()]


class SilentRecords(MemoryRecords):
    """Silent for a time: the first progress then is given up by its caller, and stored when all else has been."""

    def __init__(self) -> None:
        super().__init__()
        self.is_silent = False
        self.gives_up, self.goes_on = asyncio.Event(), asyncio.Event()
        self.given_up: list[tuple[Sequence[Change], Mapping[str, bytes | None]]] = []

    @override
    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        """See RecordStore."""
        is_progress = any(isinstance(change, SetValue) and change.key.startswith("progress/") for change in changes)
        if self.is_silent and is_progress and not self.given_up:
            self.given_up.append((changes, unchanged))
            await self.gives_up.wait()
            raise StoreUnavailable("It is not known whether the change was made.")
        if self.given_up:
            await self.goes_on.wait()
        return await super().commit(changes, unchanged=unchanged)


async def test_no_result_is_lost_while_the_store_is_silent(tmp_path: Path) -> None:
    records = SilentRecords()
    async with batch_gateway(tmp_path, slowly, max_in_flight=1, records=records) as served:
        batch = await served.submit(chat_lines(40))
        await served.wait_for_lines(batch["id"], 1)
        records.is_silent = True
        log = tmp_path / "results" / f"{batch['id']}.log"

        async def is_whole() -> bool:
            return bool(records.given_up) and len(log.read_bytes().splitlines()) == 41

        await eventually(is_whole)
        await asyncio.sleep(0.5)  # the end of the batch is being stored
        records.gives_up.set()
        await asyncio.sleep(0.1)
        records.goes_on.set()
        await served.wait_for(batch["id"])
        for changes, unchanged in records.given_up:
            await records.commit(changes, unchanged=unchanged)
        done = await served.batch(batch["id"])
        assert len(await served.results(done["output_file_id"])) == 40
    assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}


class LateRecords(MemoryRecords):
    """Answers late where a batch is still being validated, as over a network that loses a packet."""

    @override
    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """See RecordStore."""
        found = await super().read(keys)
        batches = [raw for key, raw in zip(keys, found, strict=True) if key.startswith("batch/") and raw is not None]
        is_poll = len(keys) > 1  # with the progress
        if is_poll and any(decode(raw, BatchRecord).status is BatchStatus.VALIDATING for raw in batches):
            await asyncio.sleep(0.3)
        return found


async def test_a_late_answer_of_the_store_cancels_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with batch_gateway(tmp_path, slowly, records=LateRecords(), is_driven=False) as served:
        whole = served.stores.blobs.chunks

        async def slow_chunks(file_id: FileId, start: int = 0) -> AsyncIterator[bytes]:
            await asyncio.sleep(0.35)  # as a large file takes
            async for chunk in whole(file_id, start):
                yield chunk

        monkeypatch.setattr(served.stores.blobs, "chunks", slow_chunks)
        made = await served.submit(chat_lines(100))
        served.start_driver()
        done = await served.wait_for(made["id"])
    assert (done["status"], done["request_counts"]["failed"]) == ("completed", 0)


async def test_a_late_answer_of_the_store_begins_no_batch_again_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_POLL_S", 0.02)
    has_polled = asyncio.Event()

    def script(request: Request) -> Script:
        is_first = len(served.backend.submitted) == 1
        return saying("hello", held_until=None if is_first else has_polled)(request)

    async with batch_gateway(tmp_path, script, max_in_flight=1) as served:
        batch = await served.submit(chat_lines(5))
        await served.wait_for_lines(batch["id"], 1)
        read = served.stores.repository.active_batches
        polls: list[list[BatchSnapshot]] = []
        goes_on = asyncio.Event()

        async def late() -> list[BatchSnapshot]:
            found = await read()
            polls.append(found)
            has_polled.set()
            if len(polls) == 1:
                await goes_on.wait()
            return found

        async def has_polled_again() -> bool:
            return len(polls) >= 4  # the deletion has looked, and the driver twice

        monkeypatch.setattr(served.stores.repository, "active_batches", late)
        done = await served.wait_for(batch["id"])
        assert [one.record.status for one in polls[0]] == [BatchStatus.IN_PROGRESS]
        assert (await served.client.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200
        goes_on.set()
        await eventually(has_polled_again)
        assert (await served.batch(batch["id"]))["request_counts"] == done["request_counts"]
        assert len(await served.results(done["output_file_id"])) == 5


async def damage(served: BatchGateway, key: str) -> None:
    """Damage a value as a disk might: Redis keeps no checksums of values."""
    [raw] = await served.records.read([key])
    assert raw is not None
    await served.records.commit([SetValue(key, b"?" + raw[1:])], unchanged={})


async def test_damaged_progress_is_added_up_anew_from_the_log(undriven: BatchGateway) -> None:
    batch = await undriven.submit(chat_lines(3))
    await damage(undriven, f"progress/{batch['id']}")
    undriven.start_driver()

    async def is_told() -> bool:
        return (await undriven.client.get(f"/v1/batches/{batch['id']}")).status_code == 200

    await eventually(is_told)
    done = await undriven.wait_for(batch["id"])
    assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert len(await undriven.results(done["output_file_id"])) == 3


@each("kind", ["capacity/", "harvest", "usage/", "usage-of/"])
async def test_damaged_statistics_hold_up_no_batch(tmp_path: Path, kind: str) -> None:
    async with batch_gateway(tmp_path, slowly, max_in_flight=1) as served:
        first = await served.submit(chat_lines(12))
        await served.wait_for_lines(first["id"], 1)
        await served.stop_driver()
        damaged = served.records.keys_of(kind)
        assert damaged
        for key in damaged:
            await damage(served, key)
        served.start_driver()
        second = await served.submit(chat_lines(1))
        ended = [await served.wait_for(batch["id"]) for batch in (first, second)]
    assert [one["request_counts"]["completed"] for one in ended] == [12, 1]


async def test_a_line_that_can_be_read_no_longer_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_tracker, "_FIRST_PAUSE_S", 0.02)
    is_damaged = asyncio.Event()  # before the first line has ended, and the others are read
    async with batch_gateway(tmp_path, saying("hello", held_until=is_damaged), max_in_flight=1) as served:
        made = await served.submit(chat_lines(4))
        await served.wait_for(made["id"], "in_progress")
        file = tmp_path / "files" / made["input_file_id"]
        content = file.read_bytes()
        place = content.rindex(b'"messages"')
        file.write_bytes(content[:place] + b"\0\0\0" + content[place + 3 :])
        is_damaged.set()
        done = await served.wait_for(made["id"])
        (failure,) = await served.results(done["error_file_id"])
    assert done["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    assert "unreadable line 4" in failure


@each("is_cancelled", [True, False])
async def test_a_batch_whose_file_has_lost_lines_waits_for_it_and_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    monkeypatch.setattr(driver, "_RESTART_S", 0.02)
    async with batch_gateway(tmp_path, slowly, max_in_flight=1) as served:
        made = await served.submit(chat_lines(20))
        await served.wait_for_lines(made["id"], 1)
        await served.stop_driver()
        file = tmp_path / "files" / made["input_file_id"]
        os.truncate(file, file.stat().st_size // 2)
        served.start_driver()

        async def is_waiting() -> bool:
            found = await served.batch(made["id"])
            return "the input file has changed" in str(found["alignedserve"]["paused"])

        await eventually(is_waiting)
        if is_cancelled:
            assert (await served.client.post(f"/v1/batches/{made['id']}/cancel")).status_code == 200
        else:
            file.unlink()
            a_day_later = SimpleNamespace(time=lambda: time.time() + 86_400.0, monotonic=time.monotonic)
            monkeypatch.setattr(run, "time", a_day_later)
        done = await served.wait_for(made["id"])
        kept, errors = [await served.results(done[name]) for name in ("output_file_id", "error_file_id")]
    assert done["status"] == ("cancelled" if is_cancelled else "expired")
    assert kept
    assert len(kept) + len(errors) == 20
    assert any("unreadable line 20" in line for line in errors)


async def test_a_batch_whose_results_cannot_be_written_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, broken, num_tries = DiskLog.append, "", 0

    def appended(log: DiskLog, records: Sequence[ResultRecord]) -> None:
        nonlocal num_tries
        if records[0].line >= 0 and broken.encode() in records[0].payload:
            num_tries += 1
            raise StorageError("results cannot be written or read: Input/output error")
        append(log, records)

    monkeypatch.setattr(driver, "_FULL_S", 0.5)
    async with batch_gateway(tmp_path, slowly, max_in_flight=4) as served:
        first = await served.submit(chat_lines(20))
        broken = first["id"].removeprefix("batch_")
        monkeypatch.setattr(DiskLog, "append", appended)

        async def has_failed() -> bool:
            return num_tries > 0

        await eventually(has_failed)
        other = await served.wait_for((await served.submit(chat_lines(40)))["id"], timeout_s=10.0)
        assert other["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        waiting = await served.batch(first["id"])
        assert "Input/output error" in waiting["alignedserve"]["paused"]
        assert num_tries < 20  # it is left in peace meanwhile
        monkeypatch.setattr(DiskLog, "append", append)
        done = await served.wait_for(first["id"])
    assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


class SmallDisk(MemoryRecords):
    """A store on a disk that is full for a while."""

    is_full = False

    @override
    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        """See RecordStore."""
        if self.is_full:
            raise StoreFull("no space left on the disk for records")
        return await super().commit(changes, unchanged=unchanged)


@each("is_validated", [True, False])
async def test_a_full_disk_keeps_no_reason_from_being_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_validated: bool
) -> None:
    def full(log: DiskLog, records: Sequence[ResultRecord]) -> None:
        raise StorageFull("no space left on the disk for results")

    monkeypatch.setattr(driver, "_FULL_S", 0.05)
    disk = SmallDisk()
    async with batch_gateway(tmp_path, slowly, max_in_flight=2, records=disk, is_driven=is_validated) as served:
        made = await served.submit(chat_lines(12))
        if is_validated:
            await served.wait_for_lines(made["id"], 1)
        with monkeypatch.context() as filled:
            filled.setattr(DiskLog, "append", full)
            disk.is_full = True
            if not is_validated:
                served.start_driver()

            async def is_told() -> bool:
                shown = (await served.batch(made["id"]))["alignedserve"]["paused"] or ""
                page = (await served.client.get("/metrics")).text
                return shown.startswith("no space left") and (
                    not is_validated or "alignedserve_batches_paused 1" in page
                )

            await eventually(is_told)
            disk.is_full = False
        done = await served.wait_for(made["id"])
    assert (done["request_counts"]["completed"], done["alignedserve"]["paused"]) == (12, None)
    assert served.stores.repository.unsaved == {}


async def test_a_lower_limit_of_lines_holds_for_new_batches_alone(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, slowly, max_in_flight=1) as served:
        made = await served.submit(chat_lines(8, user="x" * 500))
        await served.wait_for_lines(made["id"], 1)
        await served.stop_driver()
        served.config = BatchesConfig(max_line_bytes=400, max_lines=4)
        served.start_driver()
        done = await served.wait_for(made["id"])
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 8, "completed": 8, "failed": 0}


async def test_a_damaged_batch_stops_no_other(caplog: pytest.LogCaptureFixture, undriven: BatchGateway) -> None:
    damaged = await undriven.submit(chat_lines(3))
    await damage(undriven, f"batch/{damaged['id']}")
    other = await undriven.submit(chat_lines(2))
    undriven.start_driver()
    assert (await undriven.wait_for(other["id"]))["status"] == "completed"
    answer = await undriven.client.get(f"/v1/batches/{damaged['id']}")
    assert error_of(answer, 503)["code"] == "storage_unavailable"
    assert caplog.text.count(f"{damaged['id']} is left out: ") == 1
