"""Drives every batch that is not over. One at a time in a cluster: whoever holds the lock of the state folder.

It may be killed at any moment. Its successor gets the lock from the system, finds the batches in the store and their
results in the logs, and goes on; lines that were in the cluster run again, as they have no record.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from alignedserve.batches.housekeeping import tidy
from alignedserve.batches.line_scheduling import Pace, by_slack
from alignedserve.batches.records import BatchKey
from alignedserve.batches.run import BatchRun, Limits, Rooms
from alignedserve.batches.statistics import BatchStatistics
from alignedserve.core.errors import StorageError

logger = logging.getLogger(__name__)

_LOOK_S = 0.25  # between looks at the store for new and cancelled batches
_SAVE_S = 0.5  # between saves of progress
_WRITE_S = 0.02  # between writes: what ends meanwhile is written together
_TIDY_S = 60.0  # between looks for files that have expired
_FULL_S = 1.0  # between tries while nothing can be written
_BROKEN_S = 2.0  # before a batch that broke is taken up again
_FEED_S = 0.1
_ORDER_S = 0.1
_LOCK_S = 0.2


class BatchDriver:
    """`run` until cancelled."""

    def __init__(self, *, rooms: Rooms, limits: Limits, max_in_flight: int, lock_path: Path) -> None:
        self._rooms = rooms
        self._limits = limits
        self._max_in_flight = max_in_flight
        self._lock_path = lock_path
        self._runs: dict[BatchKey, BatchRun] = {}
        self._lives: dict[BatchKey, asyncio.Task[None]] = {}
        self._pace = Pace()
        self._ledger = BatchStatistics(rooms.book, limits.assumed_tokens_per_s, max_in_flight)
        self._has_pending = asyncio.Event()
        self._order: list[BatchRun] = []
        self._ordered_s = 0.0
        self._order_is_old = True  # a batch came, went or changed
        self._held_until_s = 0.0  # the cluster took nothing: no more lines until then
        self._is_blocked = False  # nothing can be written: no more lines

    async def run(self) -> None:
        """Take the lock when it is free, then drive."""
        lock = await _locked(self._lock_path)
        try:
            await self._ledger.load()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._every(_LOOK_S, self._look))
                tasks.create_task(self._every(_FEED_S, self._feed_again))
                tasks.create_task(self._every(_SAVE_S, self._save))
                tasks.create_task(self._every(_TIDY_S, self._tidy))
                tasks.create_task(self._write())
        finally:
            for life in self._lives.values():
                life.cancel()
            for run in self._runs.values():
                run.close()
            os.close(lock)

    # --- what to drive

    async def _look(self) -> None:
        for sight in await self._rooms.book.active_batches():
            batch_id = sight.record.batch_id
            if batch_id in self._runs:
                self._runs[batch_id].see(sight.record)
            else:
                run = BatchRun(sight.record, sight.progress, rooms=self._rooms, limits=self._limits, pace=self._pace)
                run.on_change, run.on_refusal = self._on_change, self._hold
                self._runs[batch_id] = run
                self._order_is_old = True
                self._lives[batch_id] = asyncio.create_task(self._live(run), name=batch_id)

    async def _feed_again(self) -> None:
        """Whatever waits for time to pass: pauses of lines, a cluster that took nothing."""
        self._feed()

    async def _live(self, run: BatchRun) -> None:
        """A batch that breaks is told of, and taken up again from its log with the next look."""
        batch_id = run.record.batch_id
        try:
            await run.live()
            logger.info("%s is %s", batch_id, run.record.status.value)
        except StorageError as error:
            logger.error("%s pauses: %s", batch_id, error)
            await self._pause(run, str(error))
        except Exception:
            logger.exception("%s broke and is taken up again", batch_id)
            await self._pause(run, "a fault of the server; it is in its log")
        finally:
            run.close()
            del self._runs[batch_id], self._lives[batch_id]
            self._order_is_old = True

    async def _pause(self, run: BatchRun, reason: str) -> None:
        """Say why it does not go on, before it is tried again."""
        run.note_pause(reason)
        with contextlib.suppress(StorageError):
            await run.save()
        await asyncio.sleep(_BROKEN_S)

    async def _save(self) -> None:
        runs = list(self._runs.values())
        self._ledger.note_cluster_totals(self._rooms.runner.cluster_totals())
        self._ledger.quote(runs, time.time())
        for run in runs:
            await run.save()
        await self._ledger.save(runs, time.time(), is_paused=self._is_blocked)

    async def _tidy(self) -> None:
        await tidy(self._rooms, time.time(), batch_lifetime_s=self._limits.file_lifetime_s)

    async def _every(self, pause_s: float, do: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await do()
            except StorageError as error:
                logger.warning("running work of batches goes on without what is stored: %s", error)
                await asyncio.sleep(_FULL_S)
            await asyncio.sleep(pause_s)

    # --- lines

    def _on_change(self) -> None:
        self._has_pending.set()
        self._order_is_old |= not self._order  # a batch may have lines from now on
        self._feed()

    def _hold(self, seconds: float) -> None:
        """The cluster takes nothing now; asking with every line would only keep it busy."""
        self._held_until_s = time.monotonic() + seconds

    def _feed(self) -> None:
        """Start lines while there is room, each of the batch with the least slack."""
        now, wall_s = time.monotonic(), time.time()
        if self._is_blocked or now < self._held_until_s:
            return
        num_free = self._max_in_flight - sum(run.num_in_flight for run in self._runs.values())
        for run in self._ordered(now, wall_s) if num_free > 0 else ():
            while num_free > 0 and run.has_line(now, wall_s):
                run.start_line(now)
                num_free -= 1

    def _ordered(self, now: float, wall_s: float) -> list[BatchRun]:
        """Batches by slack. Worked out anew a few times a second and not for every line: slack changes slowly."""
        if now - self._ordered_s >= _ORDER_S or self._order_is_old:
            runs = list(self._runs.values())
            bids = (run.contender(place, self._ledger.capacity) for place, run in enumerate(runs))
            self._order = [runs[place] for place in by_slack((bid for bid in bids if bid is not None), wall_s)]
            self._ordered_s, self._order_is_old = now, False
        return self._order

    async def _write(self) -> None:
        """Everything that has ended goes to disk together, again and again."""
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            for run in list(self._runs.values()):
                if run.has_pending:
                    await self._write_one(run)
            self._feed()
            await asyncio.sleep(_FULL_S if self._is_blocked else _WRITE_S)

    async def _write_one(self, run: BatchRun) -> None:
        log, records = run.take_pending()
        try:
            await asyncio.to_thread(log.append, records)
        except StorageError as error:
            if not self._is_blocked:
                logger.error("results cannot be written, batches pause: %s", error)
            run.note_unwritten(records, str(error))
            self._is_blocked = True
            self._has_pending.set()
        else:
            self._is_blocked = False
            self._ledger.note_ended(run, records)
            run.note_durable(records, log.num_bytes)


async def _locked(path: Path) -> int:
    """Wait for the lock; the system frees it when its holder ends, however that ends."""
    file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        try:
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(_LOCK_S)
        else:
            return file_descriptor
