"""Crashes and faults of driver, log, disk and store in any order: every line ends once, with its own answer."""

import asyncio
import contextlib
import errno
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.batches import driver as driver_module
from alignedserve.batches import run as run_module
from alignedserve.batches.driver import BatchDriver
from alignedserve.batches.interfaces import LineFailed, LineRejected, LineRequest, LineResponse, ModelState
from alignedserve.batches.location import stores_in
from alignedserve.batches.log import disk_log
from alignedserve.batches.log.disk_log import ResultRecord
from alignedserve.batches.logic import BatchEvent
from alignedserve.batches.records import (
    BACKGROUND,
    BatchKey,
    BatchStatus,
    FileId,
    FileRecord,
    Progress,
    ResultKind,
    api_owner,
)
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.config.sections import BatchesConfig
from alignedserve.core.errors import StorageError, StoreUnavailable
from alignedserve.disk.durable import write_all
from tests.support.batch_samples import BATCH, INPUT, batch_record, chat_line, file_record
from tests.support.marks import many
from tests.support.memory_records import MemoryRecords
from tests.support.waiting import holds, holds_async

pytestmark = pytest.mark.slow

NUM_LINES = 40
OTHER, OTHER_INPUT = BatchKey("batch_" + "9" * 24), FileId("file-" + "9" * 24)
TROUBLES = ("driver", "torn", "store", "disk", "broken", "refused", "nothing")
Step = tuple[str, int]
STEPS = st.lists(st.tuples(st.sampled_from(TROUBLES), st.integers(0, 300)), max_size=8)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_S", "_SAVE_S", "_FULL_S", "_START_S", "_RESTART_S", "_LOCK_S", "_WRITE_S"):
        monkeypatch.setattr(driver_module, name, 0.002)
    for name in ("_POLL_S", "_STORE_RETRY_S"):
        monkeypatch.setattr(run_module, name, 0.002)
    monkeypatch.setattr("alignedserve.batches.line_tracker._FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)


class Echo:
    """A LineRunner that echoes the prompt, and fails on demand."""

    def __init__(self) -> None:
        self.trouble: str | None = None

    async def run(self, call: LineRequest) -> LineResponse:
        await asyncio.sleep(0.001)
        if self.trouble == "broken":
            raise LineFailed("broken")
        if self.trouble == "refused":
            raise LineRejected("refused", retry_after_s=0.002)
        return LineResponse(200, json.dumps({"said": call.body["messages"][0]["content"]}).encode(), 3, 2)

    def model_states(self) -> dict[str, ModelState]:
        return {}

    def may_use(self, owner: str, name: str) -> bool:
        return True

    def model_of(self, name: str) -> str:
        return name


class World:
    """Stores that survive, and a driver that does not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = MemoryRecords()
        self.runner = Echo()
        self.stores = stores_in(folder, self.records)
        self.is_full = False
        self._driving: asyncio.Task[None] | None = None

    async def submit(self, batch_id: BatchKey = BATCH, input_id: FileId = INPUT, owner: str = "anyone") -> None:
        content = b"".join(chat_line(f"c{number}", content=f"w{number}") + b"\n" for number in range(NUM_LINES))
        writer = await self.stores.blobs.begin(input_id)
        await writer.write(content)
        await writer.commit()
        source = file_record(file_id=input_id, owner=owner, num_bytes=len(content), num_lines=NUM_LINES)
        await self.stores.repository.add_file(source, fits=lambda _: True)
        now = time.time()
        sizes = {"input_bytes": len(content), "input_lines": NUM_LINES}
        ids = {"batch_id": batch_id, "input_file_id": input_id, "owner": owner}
        record = batch_record(**ids, created_s=now, expires_s=now + 3600.0, **sizes)
        last = await self.stores.repository.last_created(record.owner)
        assert await self.stores.repository.add_batch(
            BatchSnapshot(record, Progress()), source, last, idempotency_key=None, key_lifetime_s=0.0
        )

    def start(self) -> None:
        config = BatchesConfig(max_lines=1000, max_line_bytes=1 << 20, max_attempts=10_000, file_lifetime_s=1e6)
        one = BatchDriver(stores=self.stores, runner=self.runner, config=config, models=("tiny",), max_in_flight=6)
        self._driving = asyncio.create_task(one.run())

    async def crash(self) -> None:
        """Stop the driver as SIGKILL does: results that were not written are lost."""
        assert self._driving is not None
        self._driving.cancel()
        await asyncio.gather(self._driving, return_exceptions=True)
        self._driving = None

    def tear(self, num_bytes: int) -> None:
        """Tear a record, as if its writer had died while writing it."""
        for path in (self.folder / "results").glob("*.log"):
            whole = [b"0123456789abcdef 0 c 1 1 {}\n", *path.read_bytes().splitlines(keepends=True)][-1]
            with path.open("ab") as file:
                file.write(whole[: num_bytes % len(whole)])

    async def suffer(self, step: Step) -> None:
        trouble, amount = step
        if trouble in ("driver", "torn"):
            await self.crash()
            if trouble == "torn":
                self.tear(amount)
            self.start()
        self.records.is_down, self.is_full = trouble == "store", trouble == "disk"
        self.runner.trouble = trouble
        await asyncio.sleep(amount / 10_000)

    def write_all(self, file_descriptor: int, content: bytes) -> None:
        """Write part of it, as on a disk with little room left."""
        if not self.is_full:
            write_all(file_descriptor, content)
            return
        os.write(file_descriptor, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    async def is_over(self) -> bool:
        snapshot = await self.stores.repository.batch(BATCH)
        return snapshot is not None and snapshot.record.is_over

    async def end(self, batch_id: BatchKey = BATCH) -> BatchSnapshot:
        await self.suffer(("nothing", 0))
        async with asyncio.timeout(20):
            while True:
                snapshot = await self.stores.repository.batch(batch_id)
                assert snapshot is not None
                if snapshot.record.is_over:
                    return snapshot
                await asyncio.sleep(0.002)

    def said(self, log_bytes: int) -> list[tuple[str, str]]:
        chunks = self.stores.logs.lines(BATCH, ResultKind.OUTPUT, log_bytes)
        lines = [json.loads(line) for line in b"".join(chunks).splitlines()]
        return [(line["custom_id"], line["response"]["body"]["said"]) for line in lines]


async def survive(folder: Path, steps: list[Step]) -> None:
    world = World(folder)
    await world.submit()
    with mock.patch.object(disk_log, "write_all", world.write_all):
        world.start()
        for step in steps:
            await world.suffer(step)
        snapshot = await world.end()
        await world.crash()
    assert snapshot.record.status is BatchStatus.COMPLETED
    assert sorted(world.said(snapshot.progress.log_bytes)) == sorted(
        (f"c{number}", f"w{number}") for number in range(NUM_LINES)
    )


def check(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(survive(Path(name), steps))


@settings(max_examples=12)
@given(STEPS)
def test_every_line_ends_once(steps: list[Step]) -> None:
    check(steps)


@pytest.mark.slow
@settings(max_examples=many(60))
@given(STEPS)
def test_every_line_ends_once_in_many_histories(steps: list[Step]) -> None:
    check(steps)


async def test_a_run_that_fails_while_the_disk_is_full_blocks_no_lines_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    await world.submit()
    waits = run_module.BatchRun._wait_for_change
    is_broken = False

    async def wait_for_change(run: run_module.BatchRun) -> None:
        if is_broken:
            raise RuntimeError("a fault of the server")
        await waits(run)

    monkeypatch.setattr(run_module.BatchRun, "_wait_for_change", wait_for_change)
    monkeypatch.setattr(disk_log, "write_all", world.write_all)
    world.runner.trouble = "refused"
    world.start()
    await asyncio.sleep(0.1)  # the log is open, and no line has run
    world.is_full, world.runner.trouble = True, None
    await asyncio.sleep(0.1)  # lines have ended, and their records wait for the disk
    is_broken = True
    await asyncio.sleep(0.1)
    is_broken = False
    assert (await world.end()).record.status is BatchStatus.COMPLETED
    await world.crash()


async def test_results_that_a_run_could_not_write_as_it_ended_hold_up_no_lines_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write fails as its run has ended; the next one, of another batch, lasts until the first batch is resumed."""
    world = World(tmp_path)
    await world.submit()
    await world.submit(OTHER, OTHER_INPUT, owner="another")
    failing: list[run_module.BatchRun] = []
    has_closed, has_resumed = asyncio.Event(), asyncio.Event()
    waits, writes = run_module.BatchRun._wait_for_change, run_module.BatchRun.write_results
    closes = run_module.BatchRun.close

    async def wait_for_change(run: run_module.BatchRun) -> None:
        if run in failing:
            raise RuntimeError("a fault of the server")
        if has_closed.is_set() and run.record.batch_id == BATCH:
            has_resumed.set()
        await waits(run)

    async def write_results(run: run_module.BatchRun) -> list[ResultRecord]:
        if run.record.batch_id == BATCH and not failing:
            failing.append(run)
            await has_closed.wait()
            raise StorageError("the result log is closed")
        if failing:
            await has_resumed.wait()
        return await writes(run)

    def close(run: run_module.BatchRun) -> None:
        closes(run)
        if run in failing:
            has_closed.set()

    for name, patched in (("_wait_for_change", wait_for_change), ("write_results", write_results), ("close", close)):
        monkeypatch.setattr(run_module.BatchRun, name, patched)
    world.start()
    assert (await world.end()).record.status is BatchStatus.COMPLETED
    assert (await world.end(OTHER)).record.status is BatchStatus.COMPLETED
    await world.crash()


async def test_what_a_run_that_failed_still_saves_replaces_nothing_that_its_next_run_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its progress is on its way to the store, after it has failed, until the batch is over, or for a while."""
    world = World(tmp_path)
    await world.submit()
    waits, saves, runs = run_module.BatchRun._wait_for_change, world.stores.repository.save_progress, world.runner.run
    failing: list[run_module.BatchRun] = []
    has_paused, held = False, list[Progress]()

    async def wait_for_change(run: run_module.BatchRun) -> None:
        if not failing and run.num_waiting < NUM_LINES - 6:
            failing.append(run)
        if run in failing:
            raise RuntimeError("a fault of the server")
        await waits(run)

    async def save_progress(batch_id: BatchKey, progress: Progress, files: Sequence[FileRecord] = ()) -> None:
        nonlocal has_paused
        if has_paused and not held:
            held.append(progress)
            with contextlib.suppress(TimeoutError):
                await holds_async(world.is_over, 0.5)
        has_paused |= progress.paused is not None
        await saves(batch_id, progress, files)

    async def run_slowly(call: LineRequest) -> LineResponse:
        await asyncio.sleep(0.01)
        return await runs(call)

    monkeypatch.setattr(driver_module, "_RESTART_S", 0.03)
    monkeypatch.setattr(run_module.BatchRun, "_wait_for_change", wait_for_change)
    monkeypatch.setattr(world.stores.repository, "save_progress", save_progress)
    monkeypatch.setattr(world.runner, "run", run_slowly)
    world.start()
    await world.end()
    await asyncio.sleep(0.05)  # the first run's is there as well
    snapshot = await world.end()
    await world.crash()
    assert held[0].counts.completed < NUM_LINES
    assert snapshot.progress.counts.completed == NUM_LINES
    assert len(world.said(snapshot.progress.log_bytes)) == NUM_LINES


async def test_a_batch_that_can_never_be_written_holds_up_no_others_after_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    await world.submit(OTHER, OTHER_INPUT, owner="another")
    num_broken = num_full = 0

    def write(file_descriptor: int, content: bytes) -> None:
        nonlocal num_broken, num_full
        if f"batch_req_{OTHER.removeprefix('batch_')}".encode() in content:
            num_broken += 1
            raise OSError(errno.EIO, "the disk does not answer")
        if b"batch_req_" in content and num_full < 5:
            num_full += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(file_descriptor, content)

    monkeypatch.setattr(disk_log, "write_all", write)
    world.start()
    await holds(lambda: num_broken > 0)
    await world.submit()
    assert (await world.end()).record.status is BatchStatus.COMPLETED
    assert num_full == 5
    await world.crash()


async def test_a_clock_set_back_as_the_window_ends_leaves_a_batch_that_waits_for_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    await world.submit()
    world.runner.trouble = "refused"
    world.start()
    await asyncio.sleep(0.1)  # it is validated
    await world.crash()
    path, clock, advances = tmp_path / "files" / INPUT, time.time, run_module.BatchRun._advance
    path.rename(tmp_path / "elsewhere")
    ahead_s, has_come = 7200.0, asyncio.Event()

    async def advance(run: run_module.BatchRun, event: BatchEvent) -> None:
        nonlocal ahead_s
        ahead_s = 0.0
        await advances(run, event)
        has_come.set()

    monkeypatch.setattr(time, "time", lambda: clock() + ahead_s)
    monkeypatch.setattr(run_module.BatchRun, "_advance", advance)
    world.runner.trouble = None
    world.start()
    await has_come.wait()
    (tmp_path / "elsewhere").rename(path)
    snapshot = await world.end()
    await world.crash()
    assert snapshot.record.status is BatchStatus.COMPLETED
    assert len(world.said(snapshot.progress.log_bytes)) == NUM_LINES


async def test_the_input_of_another_api_goes_with_its_batch_although_the_store_is_down_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    owner = api_owner("anyone", BACKGROUND)
    await world.submit(owner=owner)
    removes, num_refused = world.stores.repository.remove_file, 0

    async def remove_file(record: FileRecord) -> bool:
        nonlocal num_refused
        num_refused += 1
        if num_refused <= 3:
            raise StoreUnavailable("down")
        return await removes(record)

    monkeypatch.setattr(world.stores.repository, "remove_file", remove_file)
    world.start()
    await world.end()
    await holds(lambda: not (tmp_path / "files" / INPUT).exists(), timeout_s=5.0)
    await world.crash()
    assert (await world.stores.repository.stored_by(owner)).num_files == 0
