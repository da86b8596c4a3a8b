"""The file of records: its format and version, how it is opened, checked and begun, and its clock."""

import contextlib
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from alignedserve.batches.records import RECORDS_VERSION
from alignedserve.core.errors import ResourceError, StorageDamaged
from alignedserve.disk.durable import sync_folder

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
    """The time that lifetimes are counted in: it goes on with the time that passes, whatever sets the wall clock.

    It begins as the wall clock. While no process has the file open, the wall clock says how much time has passed, and
    never less than none. `wall` and `steady`: clocks in seconds.
    """

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
    sqlite3.Error, OSError.

    A missing file is not made: one without records would have the contents removed that it does not know.
    """
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
    """Check the file before anything is started on it. Raises ResourceError that names it.

    A file of another version or program, and one whose structure is damaged, are left as they are.
    """
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
