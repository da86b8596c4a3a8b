"""Records in one SQLite file. Only the batch driver opens it; other processes ask the driver's state server.

A thread does what is asked. Commits that wait when it comes to them become one transaction, with one sync of the disk
for all (group commit). The file is in write-ahead mode and `synchronous=FULL`: a commit is on the disk when it is
answered, and a process or machine that dies leaves all of it or nothing.
"""

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from alignedserve.batches.interfaces import Page
from alignedserve.batches.stores.sqlite_file import StoreClock, connect
from alignedserve.core.errors import StorageError, StoreFull, StoreUnavailable
from alignedserve.messages.state import AddToIndex, Change, DeleteValue, RemoveFromIndex, SetValue

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
