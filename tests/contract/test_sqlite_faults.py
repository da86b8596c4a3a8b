"""The record store in a file: killed in the middle of commits, on a full disk, damaged, of another version."""

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from alignedserve.batches.records import Progress
from alignedserve.batches.repository import BatchRepository, BatchSnapshot
from alignedserve.batches.stores.sqlite_records import DAMAGED, SqliteRecords, StoreClock, begin_file
from alignedserve.cluster.batch_storage import prepare_records
from alignedserve.core.errors import ResourceError, StorageDamaged, StoreFull, StoreUnavailable
from alignedserve.messages.state import AddToIndex, SetValue
from tests.support.batch_samples import BATCH, batch_record, file_record

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def opened(path: Path) -> AsyncIterator[SqliteRecords]:
    """The store in this file, which is made if it is missing."""
    _make(path)
    records = SqliteRecords(path)
    try:
        yield records
    finally:
        await records.close()


def _make(path: Path) -> None:
    if not path.exists():
        begin_file(path)


# --- kills

_WRITER = """
import asyncio, sys
from pathlib import Path
from alignedserve.batches.stores.sqlite_records import begin_file
from alignedserve.batches.stores.sqlite_records import SqliteRecords
from alignedserve.messages.state import AddToIndex, SetValue

async def write(records, writer):
    number = 0
    while True:
        key = f"{writer}-{number}"
        last = SetValue(f"last-{writer}", b"%d" % number)
        changes = [SetValue(key, key.encode() * 200), AddToIndex("all", key, number), last]
        assert await records.commit(changes, unchanged={key: None})
        print(key, flush=True)
        number += 1

async def main():
    begin_file(Path(sys.argv[1]))
    records = SqliteRecords(Path(sys.argv[1]))
    await asyncio.gather(*(write(records, writer) for writer in range(8)))

asyncio.run(main())
"""


def killed_writer(path: Path, num_commits: int) -> list[str]:
    """Return the keys that a process was told to be kept before it was killed among commits."""
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(num_commits)]
        process.kill()
        told += process.stdout.readlines()
    return [line.strip() for line in told if line.endswith("\n")]


async def test_a_kill_among_commits_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path, told = tmp_path / "records.db", []
    for num_commits in (1, 40, 300):
        path = tmp_path / f"records-{num_commits}.db"
        told = killed_writer(path, num_commits)
        prepare_records(path)  # finds nothing wrong
        async with opened(path) as records:
            assert await records.read(told) == [key.encode() * 200 for key in told]
            page = await records.page("all", after=None, limit=100_000, newest_first=False)
            assert page is not None
            assert set(told) <= set(page.members)
            # A commit is there as a whole or not at all.
            for writer in range(8):
                last = (await records.read([f"last-{writer}"]))[0]
                numbers = [int(key.split("-")[1]) for key in page.members if key.startswith(f"{writer}-")]
                assert numbers == list(range(len(numbers)))
                assert last == (b"%d" % (len(numbers) - 1) if numbers else None)


async def test_a_log_that_was_torn_at_its_end_costs_only_what_was_not_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    async with opened(path) as records:
        for number in range(20):
            await records.commit([SetValue(f"key-{number}", b"x" * 100)], unchanged={})
        copies = {name: (tmp_path / name).read_bytes() for name in ("records.db", "records.db-wal")}
    for name, content in copies.items():  # as the machine that died left them, and its last write torn
        (tmp_path / name).write_bytes(content[:-7] if name.endswith("wal") else content)
    async with opened(path) as records:
        found = await records.read([f"key-{number}" for number in range(20)])
    assert found[:19] == [b"x" * 100] * 19


async def test_while_another_process_has_the_file_the_store_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    async with opened(path) as records, opened(path) as second:
        await records.commit([SetValue("a", b"1")], unchanged={})
        with pytest.raises(StoreUnavailable):
            await second.read(["a"])
        await records.close()
        assert await second.read(["a"]) == [b"1"]


# --- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_disk_that_fills_refuses_in_words_keeps_all_and_goes_on(small_disk: Path) -> None:
    kept: list[str] = []
    async with opened(small_disk / "records.db") as records:
        await records.commit([SetValue("first", b"1")], unchanged={})
        ballast = small_disk / "ballast"
        ballast.write_bytes(b"\0" * 400_000)
        refused: list[str] = []
        for number in range(200):
            try:
                await records.commit([SetValue(f"key-{number}", b"x" * 5000)], unchanged={})
            except StoreFull as error:
                refused.append(str(error))
            else:
                kept.append(f"key-{number}")
        assert set(refused) == {"no space left on the disk for records.db, which keeps files and batches"}
        assert kept
        assert await records.read([*kept, "first"]) == [b"x" * 5000] * len(kept) + [b"1"]
        assert None in await records.read([f"key-{number}" for number in range(200)])
        # Those of many that fit are made, whatever the others are.
        ballast.unlink()
        late = (records.commit([SetValue(f"late-{number}", b"2")], unchanged={}) for number in range(9))
        assert all(await asyncio.gather(*late))
    async with opened(small_disk / "records.db") as records:
        assert await records.read([*kept, "late-8"]) == [b"x" * 5000] * len(kept) + [b"2"]


async def test_a_disk_that_is_full_at_the_start_is_named(small_disk: Path) -> None:
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    with pytest.raises(ResourceError, match=r"records\.db"):
        prepare_records(small_disk / "records.db")
    (small_disk / "ballast").unlink()
    prepare_records(small_disk / "records.db")
    async with opened(small_disk / "records.db") as records:
        assert await records.commit([SetValue("a", b"1")], unchanged={})
        assert await records.read(["a"]) == [b"1"]


# --- files that are not as they should be


async def test_a_newer_version_is_refused_by_name_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    begin_file(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 9")
    before = state_of(tmp_path)
    with pytest.raises(ResourceError, match=r"records\.db is of a newer version of AlignedServe \(format 9"):
        prepare_records(path)
    async with opened(path) as records:
        with pytest.raises(StoreUnavailable, match="newer version"):
            await records.commit([SetValue("a", b"2")], unchanged={})
    assert state_of(tmp_path) == before


def state_of(folder: Path) -> list[tuple[str, bytes, int]]:
    return [(path.name, path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]


async def filled(path: Path) -> None:
    async with opened(path) as records:
        for first in range(0, 2000, 100):
            changes = [SetValue(f"key-{number}", os.urandom(300)) for number in range(first, first + 100)]
            members = [AddToIndex("list", f"key-{number}", number) for number in range(first, first + 100)]
            await records.commit([*changes, *members], unchanged={})


@pytest.mark.parametrize("way", ["beginning", "middle", "cut"])
async def test_a_damaged_file_is_named_and_left_as_it_is(tmp_path: Path, way: str) -> None:
    path = tmp_path / "records.db"
    await filled(path)
    content = bytearray(path.read_bytes())
    if way == "beginning":
        content[:32] = b"\xff" * 32
    elif way == "cut":
        content = content[: len(content) // 2]
    else:
        for page in range(8, len(content) // 4096, 3):
            content[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(content)
    with pytest.raises(ResourceError, match=r"records\.db is damaged.*docs/batches\.md"):
        prepare_records(path)
    assert path.read_bytes() == content


async def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (id)")
    with pytest.raises(ResourceError, match="another program"):
        prepare_records(path)


async def test_damage_in_a_value_is_found_and_costs_only_that_value(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    whole = BatchSnapshot(batch_record(), Progress(log_bytes=77))
    async with opened(path) as records:
        await BatchRepository(records).add_file(file_record(), fits=lambda _: True)
        assert await BatchRepository(records).add_batch(
            whole, file_record(), None, idempotency_key=None, key_lifetime_s=0.0
        )
    content = path.read_bytes()
    assert content.count(b'{"log_bytes":77') == 1
    path.write_bytes(content.replace(b'{"log_bytes":77', b'{"log_bytes":78'))  # still reads as a record
    prepare_records(path)
    async with opened(path) as records:
        assert await BatchRepository(records).active_batches() == [BatchSnapshot(whole.record, Progress())]
        with pytest.raises(StorageDamaged):
            await BatchRepository(records).batch(BATCH)


async def test_whatever_goes_wrong_everyone_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    async with opened(path) as records:
        await records.commit([SetValue("a", b"1"), SetValue("b", b"2")], unchanged={})
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE records SET value = 7 WHERE key = 'a'")  # no bytes: damage may change the type
    async with opened(path) as records, asyncio.timeout(10.0):
        assert await records.read(["a", "b"]) == [DAMAGED, b"2"]
        with pytest.raises(StoreUnavailable):
            await records.read(["\ud800"])  # no text at all
        assert await records.read(["b"]) == [b"2"]


async def test_a_thread_that_could_not_be_started_is_started_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with opened(tmp_path / "records.db") as records, asyncio.timeout(10.0):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            with pytest.raises(RuntimeError):
                await records.read(["a"])
        assert await records.read(["a"]) == [None]


def test_a_missing_file_beside_contents_is_not_replaced_by_an_empty_one(tmp_path: Path) -> None:
    """The contents that it does not know would be removed an hour later."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / f"file-{'1' * 24}").write_bytes(b"kept")
    with pytest.raises(ResourceError, match=r"records\.db is missing, and the files and results beside it"):
        prepare_records(tmp_path / "records.db")
    assert not (tmp_path / "records.db").exists()


async def test_a_file_that_goes_while_it_is_served_is_not_made_anew(tmp_path: Path) -> None:
    records = SqliteRecords(tmp_path / "records.db")
    with pytest.raises(StoreUnavailable):
        await records.commit([SetValue("a", b"1")], unchanged={})
    await records.close()
    assert state_of(tmp_path) == []


# --- clocks


def test_lifetimes_go_by_the_time_that_passes_whatever_sets_the_clock(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    begin_file(path)
    wall, steady = [1000.0], [5.0]
    clock = StoreClock(lambda: wall[0], lambda: steady[0])
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE clock SET store_s = 1000, wall_s = 1000")
        clock.resume(connection)
        steady[0] += 10.0
        wall[0] += 3600.0  # set an hour forward
        assert clock.now() == 1010.0
        clock.save(connection)
        wall[0] += 50.0  # while nothing runs
        later = StoreClock(lambda: wall[0], lambda: 0.0)  # of another start of the machine
        later.resume(connection)
        assert later.now() == 1060.0
        wall[0] -= 86_400.0
        later.resume(connection)
        assert later.now() == 1010.0  # never less than what was kept
