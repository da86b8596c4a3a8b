"""Records in one SQLite file. Only the batch driver opens it; other processes ask the driver's state server.

A thread does what is asked. Commits that wait when it comes to them become one transaction, with one sync of the disk
for all (group commit). The file is in write-ahead mode and `synchronous=FULL`: a commit is on the disk when it is
answered, and a process or machine that dies leaves all of it or nothing.

The file of records: its format and version, how it is opened, checked and begun, and its clock."""

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from alignedserve.batches.interfaces import Page
from alignedserve.batches.records import RECORDS_VERSION
from alignedserve.core.errors import ResourceError, StorageDamaged, StorageError, StoreFull, StoreUnavailable
from alignedserve.disk.durable import sync_folder
from alignedserve.messages.state import AddToIndex, Change, DeleteValue, RemoveFromIndex, SetValue

_APPLICATION = 0x414C5344  # "ALSD": that the file is ours
_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100  # with the version, and written before the first record
_TABLES = f"""
CREATE TABLE records (key TEXT PRIMARY KEY, value BLOB NOT NULL, checksum INTEGER NOT NULL, until_s REAL);
CREATE INDEX records_by_end ON records (until_s) WHERE until_s IS NOT NULL;
CREATE TABLE members (list TEXT, member TEXT, score REAL NOT NULL, PRIMARY KEY (list, member)) WITHOUT ROWID;
CREATE INDEX members_in_order ON members (list, score, member);
CREATE TABLE clock (name INTEGER PRIMARY KEY CHECK (name = 0), store_s REAL NOT NULL, wall_s REAL NOT NULL);
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {RECORDS_VERSION};
"""
_SETTINGS: tuple[str, ...] = (
    # One process has the file: no shared memory beside it, and what a stopped process holds is never half taken over.
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # the log is synced before a commit is answered; NORMAL would lose the last ones
    "PRAGMA journal_size_limit = 16777216",
    "PRAGMA cache_size = -8192",  # KiB
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",
)
_CHECKED_BYTES = 256 << 20  # a file up to this size is read whole at the start: a fifth of a second at most
_BUSY_S = 20.0  # for which the process of a cluster that was killed may still hold the file


class StoreClock:
    """The time that lifetimes are counted in: it goes on with the time that passes, whatever sets the wall clock. It
    begins as the wall clock. While no process has the file open, the wall clock says how much time has passed, and
    never less than none. `wall` and `steady`: clocks in seconds."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] | None = None) -> None:
        self._wall = wall
        self._steady = steady or _steady_s
        self._offset_s = wall() - self._steady()

    def now(self) -> float:
        """Return the time in seconds."""
        return self._steady() + self._offset_s

    def resume(self, connection: sqlite3.Connection) -> None:
        """Go on from the time that was kept in the file."""
        times = connection.execute("SELECT store_s, wall_s FROM clock").fetchone()
        if times is not None:
            store_s, wall_s = times
            self._offset_s = store_s + max(0.0, self._wall() - wall_s) - self._steady()

    def save(self, connection: sqlite3.Connection) -> None:
        """Keep the time in the file."""
        connection.execute("REPLACE INTO clock VALUES (0, ?, ?)", (self.now(), self._wall()))


def _steady_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def connect(path: Path) -> sqlite3.Connection:
    """Open the file for this process alone. Raises StorageDamaged for a file of another program or version;
    sqlite3.Error, OSError. A missing file is not made: one without records would have the contents removed that it does
    not know."""
    check_header(path)
    connection = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
    try:
        for setting in _SETTINGS:
            connection.execute(setting)
        connection.execute("BEGIN IMMEDIATE")  # takes the lock now, and keeps it
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def check_header(path: Path) -> None:
    """Check that the file is of this program and version, without a change to it. Raises StorageDamaged, OSError."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if header[: len(_MAGIC)] != _MAGIC or len(header) < _HEADER_BYTES:
        raise StorageDamaged(f"{path} is damaged: it does not begin as an SQLite database")
    if int.from_bytes(header[68:72], "big") != _APPLICATION:
        raise StorageDamaged(f"{path} is an SQLite database of another program")
    version = int.from_bytes(header[60:64], "big")
    if version > RECORDS_VERSION:
        raise StorageDamaged(
            f"{path} is of a newer version of AlignedServe (format {version}; this one knows {RECORDS_VERSION}); "
            "it was left as it is"
        )


def begin_file(path: Path) -> None:
    """Make a new file. It appears under its name when it is whole and durable. Raises sqlite3.Error, OSError."""
    partial = path.with_name(path.name + ".partial")
    for old in (partial, partial.with_name(partial.name + "-journal")):
        old.unlink(missing_ok=True)
    partial.touch(mode=0o600)
    with contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        connection.executescript(f"BEGIN; {_TABLES}")
        StoreClock().save(connection)
        connection.execute("COMMIT")
    partial.rename(path)
    sync_folder(path.parent)


def check_file(path: Path) -> None:
    """Check the file before anything is started on it. Raises ResourceError that names it. A file of another version or
    program, and one whose structure is damaged, are left as they are."""
    try:
        check_header(path)
        with contextlib.closing(_connected_soon(path)) as connection:
            if path.stat().st_size <= _CHECKED_BYTES:
                (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                if verdict != "ok":
                    raise StorageDamaged(f"{path} is damaged: {' '.join(verdict.split())}")
    except StorageDamaged as error:
        raise ResourceError(f"{error} (docs/batches.md)") from error
    except sqlite3.DatabaseError as error:
        is_damaged = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        problem = "is damaged" if is_damaged else "cannot be opened"
        raise ResourceError(f"{path} {problem}: {error} (docs/batches.md)") from error
    except OSError as error:
        raise ResourceError(f"{path} cannot be read: {error.strerror}") from error


def _connected_soon(path: Path) -> sqlite3.Connection:
    until_s = time.monotonic() + _BUSY_S
    while True:
        try:
            return connect(path)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until_s:
                raise
        time.sleep(0.05)


logger = logging.getLogger(__name__)

DAMAGED = b"\x00damaged"  # comes back for a value that fails its checksum: no record decodes it
_MAX_GROUP = 256  # commits of one transaction
_MAX_KEYS = 500  # of one query
_SWEEP_S = 60.0  # between two removals of what has expired
_MAX_SWEPT = 1000
_NOT_NOW = "The state of batches cannot be read or written now."

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class _Commit:
    changes: tuple[Change, ...]
    unchanged: Mapping[str, bytes | None]


@dataclass(frozen=True, slots=True)
class _Asked:
    work: _Commit | Callable[[sqlite3.Connection], Any]
    answered: "asyncio.Future[Any]"

    def answer(self, result: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            self.answered.get_loop().call_soon_threadsafe(self._set, result)

    def _set(self, result: object) -> None:
        if self.answered.done():
            return
        if isinstance(result, Exception):
            self.answered.set_exception(result)
        else:
            self.answered.set_result(result)


class SqliteRecords:
    """Implements RecordStore. Opens the file when first used, and again after an error of the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._connection: sqlite3.Connection | None = None
        self._clock = StoreClock()
        self._swept_s = float("-inf")

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        return await self._ask(lambda connection: self._read(connection, keys)) if keys else []

    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        """Raises StoreFull when the disk is: then nothing was applied."""
        done: bool = await self._ask(_Commit(tuple(changes), dict(unchanged)))
        return done

    async def page(self, index: str, *, after: str | None, limit: int, newest_first: bool) -> Page | None:
        page: Page | None = await self._ask(lambda connection: _page(connection, index, after, limit, newest_first))
        return page

    async def close(self) -> None:
        """Waits for what is under way."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            await asyncio.to_thread(thread.join)

    # --- the thread

    async def _ask(self, work: "_Commit | Callable[[sqlite3.Connection], ResultT]") -> Any:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="records", daemon=True)
            thread.start()
            self._thread = thread
        job = _Asked(work, asyncio.get_running_loop().create_future())
        self._queue.put(job)
        return await job.answered

    def _serve(self) -> None:
        is_open = True
        while is_open:
            group = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(group) < _MAX_GROUP:
                    group.append(self._queue.get_nowait())
            is_open = None not in group
            jobs = [job for job in group if job is not None]
            for job in jobs:
                if not isinstance(job.work, _Commit):
                    job.answer(self._tried(job.work))
            self._commit_all([job for job in jobs if isinstance(job.work, _Commit)])
        self._close()

    def _tried(self, work: Callable[[sqlite3.Connection], object]) -> object:
        """Return what the work returns, or its error. After an error the file is opened anew: what the disk has is
        found out then."""
        try:
            if self._connection is None:
                self._connection = connect(self._path)
                self._clock.resume(self._connection)
            return work(self._connection)
        except sqlite3.Error as error:
            if _code_of(error) != sqlite3.SQLITE_FULL:
                logger.exception("%s cannot be read or written", self._path)
                self._close()
            return _refusal(self._path, error)
        except (StorageError, OSError) as error:
            logger.error("%s", error)
            return StoreUnavailable(str(error).replace(str(self._path), self._path.name))
        except Exception:  # one that ended this thread would leave everyone without an answer
            logger.exception("a fault in the store of records")
            return StoreUnavailable(_NOT_NOW)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._clock.save(connection)
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    # --- commits

    def _commit_all(self, group: list[_Asked]) -> None:
        if not group:
            return
        results = self._tried(lambda connection: self._transact(connection, [job.work for job in group]))
        if isinstance(results, list):
            for job, result in zip(group, results, strict=True):
                job.answer(result)
        elif len(group) == 1:
            group[0].answer(results)
        else:
            for job in group:
                self._commit_all([job])

    def _transact(self, connection: sqlite3.Connection, commits: Iterable[Any]) -> list[bool]:
        connection.execute("BEGIN IMMEDIATE")
        try:
            results = [self._apply(connection, commit) for commit in commits]
            self._sweep(connection)
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            raise
        return results

    def _apply(self, connection: sqlite3.Connection, commit: _Commit) -> bool:
        keys = list(commit.unchanged)
        if self._read(connection, keys) != list(commit.unchanged.values()):
            return False
        for change in commit.changes:
            self._change(connection, change)
        return True

    def _change(self, connection: sqlite3.Connection, change: Change) -> None:
        match change:
            case SetValue(key, value, lifetime_s):
                until_s = None if lifetime_s is None else self._clock.now() + lifetime_s
                connection.execute(
                    "INSERT INTO records VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE"
                    " SET value = excluded.value, checksum = excluded.checksum, until_s = excluded.until_s",
                    (key, value, zlib.crc32(value), until_s),
                )
            case DeleteValue(key):
                connection.execute("DELETE FROM records WHERE key = ?", (key,))
            case AddToIndex(index, member, score):
                connection.execute(
                    "INSERT INTO members VALUES (?, ?, ?)"
                    " ON CONFLICT (list, member) DO UPDATE SET score = excluded.score",
                    (index, member, score),
                )
            case RemoveFromIndex(index, member):
                connection.execute("DELETE FROM members WHERE list = ? AND member = ?", (index, member))

    def _sweep(self, connection: sqlite3.Connection) -> None:
        now = self._clock.now()
        if now < self._swept_s + _SWEEP_S:
            return
        self._swept_s = now
        expired = "SELECT rowid FROM records WHERE until_s <= ? LIMIT ?"
        connection.execute(f"DELETE FROM records WHERE rowid IN ({expired})", (now, _MAX_SWEPT))  # noqa: S608
        self._clock.save(connection)

    # --- reads

    def _read(self, connection: sqlite3.Connection, keys: Sequence[str]) -> list[bytes | None]:
        now, values = self._clock.now(), {}
        for first in range(0, len(keys), _MAX_KEYS):
            some = keys[first : first + _MAX_KEYS]
            places = ",".join("?" * len(some))
            query = f"SELECT key, value, checksum, until_s FROM records WHERE key IN ({places})"  # noqa: S608
            for key, value, checksum, until_s in connection.execute(query, list(some)):
                if until_s is None or now < until_s:
                    values[key] = self._checked(key, value, checksum)
        return [values.get(key) for key in keys]

    def _checked(self, key: str, value: object, checksum: int) -> bytes:
        if isinstance(value, bytes) and zlib.crc32(value) == checksum:  # the type is in the file, too
            return value
        logger.error("%s: the value of %s fails its checksum", self._path, key)
        return DAMAGED


def _page(connection: sqlite3.Connection, index: str, after: str | None, limit: int, newest_first: bool) -> Page | None:
    order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
    where, values = "list = ?", [index]
    if after is not None:
        row = connection.execute("SELECT score FROM members WHERE list = ? AND member = ?", (index, after)).fetchone()
        if row is None:
            return None
        where, values = f"list = ? AND (score, member) {beyond} (?, ?)", [index, row[0], after]
    query = f"SELECT member FROM members WHERE {where} ORDER BY score {order}, member {order} LIMIT ?"  # noqa: S608
    members = [member for (member,) in connection.execute(query, [*values, limit + 1])]
    return Page(tuple(members[:limit]), len(members) > limit)


def _refusal(path: Path, error: sqlite3.Error) -> StoreUnavailable:
    code = _code_of(error)
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(f"no space left on the disk for {path.name}, which keeps files and batches")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreUnavailable(f"{path.name}, which keeps files and batches, is damaged.")
    return StoreUnavailable(_NOT_NOW)


def _code_of(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
