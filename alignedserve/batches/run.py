"""One batch at work: its file is read, its lines run, their records are written, and it ends.

What it holds in memory follows from the input file and the result log, so whoever takes it over after a crash goes on
from there. Its one truth is the log: a line is done when its record is durable, not before.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import msgspec

from alignedserve.batches import result_lines
from alignedserve.batches.eta import Capacity, Workload, workload
from alignedserve.batches.input_file import read_input
from alignedserve.batches.input_lines import Inspection, parse_line
from alignedserve.batches.interfaces import BlobReader, BlobStore, LineBroken, LineCall, LineNotTaken, LineRunner
from alignedserve.batches.line_scheduling import Contender, Pace, line_deadline_s
from alignedserve.batches.line_tracker import LineTracker
from alignedserve.batches.log.disk_log import DiskLog, DiskLogs
from alignedserve.batches.log.log_format import LogTotals, ResultRecord
from alignedserve.batches.log.log_opening import opened_log
from alignedserve.batches.logic import AllRecorded, BatchEvent, Refused, TimePassed, Validated, advance
from alignedserve.batches.records import (
    BatchRecord,
    BatchStatus,
    FileRecord,
    Progress,
    Quote,
    ResultKind,
)
from alignedserve.batches.repository import BatchRepository
from alignedserve.batches.result_files import result_files
from alignedserve.core.errors import StorageError, StoreUnavailable

logger = logging.getLogger(__name__)

_STORE_RETRY_S = 0.5
_LOOK_S = 0.25
_QUOTE_S = 2.0
_ENDING_LINES = 4000  # records of lines that never ran, written at a time
_ENDING = frozenset({BatchStatus.CANCELLING, BatchStatus.FINALIZING})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may be, and how patiently it is run."""

    models: tuple[str, ...]
    max_lines: int
    max_line_bytes: int
    max_attempts: int
    assumed_tokens_per_s: float
    file_lifetime_s: float


@dataclass(frozen=True, slots=True)
class Rooms:
    """Where a batch finds what it needs."""

    book: BatchRepository
    blobs: BlobStore
    logs: DiskLogs
    runner: LineRunner


class BatchRun:
    """Call `live` once. The driver feeds it lines to start and writes what is `pending`."""

    def __init__(self, record: BatchRecord, progress: Progress, *, rooms: Rooms, limits: Limits, pace: Pace) -> None:
        self.record = record
        self.progress = progress
        self.lines: LineTracker | None = None  # once they run
        self.on_change: Callable[[], None] = lambda: None  # a line has ended, or more may be started
        self.on_refusal: Callable[[float], None] = lambda _: None  # the cluster takes nothing for so many seconds
        self._rooms = rooms
        self._limits = limits
        self._pace = pace
        self._inspection = Inspection(record.endpoint, limits.models, limits.max_lines)
        self._input: BlobReader | None = None
        self._log: DiskLog | None = None
        self._pending: list[ResultRecord] = []  # ended, not yet durable
        self._is_writing = False  # what was pending is on its way to the disk
        self._totals = LogTotals()
        self._log_bytes = 0  # durable, and in the totals
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._is_dirty = False

    # --- for the driver

    def see(self, record: BatchRecord) -> None:
        """What the store says of it now: a client may have cancelled it."""
        if record.status is not self.record.status:
            self.record = record
            self._changed.set()

    def workload(self, capacity: Capacity) -> Workload:
        """What is left of it."""
        return workload(self.record, self._current_progress(), capacity)

    def contender(self, place: int, capacity: Capacity) -> Contender | None:
        """Its bid for places in the cluster; None while it has no lines to run."""
        if self.lines is None or self.record.status is not BatchStatus.IN_PROGRESS:
            return None
        work_s = self.workload(capacity).num_tokens / capacity.tokens_per_s
        return Contender(place, self.record.expires_s, work_s, self.record.created_s)

    def has_line(self, now: float, wall_s: float) -> bool:
        """Whether a line may be started now."""
        if self.lines is None or self.record.status is not BatchStatus.IN_PROGRESS:
            return False
        return self.lines.next_due_s(now) == 0.0 and wall_s < self.record.expires_s

    def start_line(self, now: float) -> None:
        """Lease the next line and run it."""
        assert self.lines is not None, "a line of a batch that is not running"
        line = self.lines.lease(now)
        assert line is not None, "a line where none is due"
        task = self._tasks[line] = asyncio.create_task(self._run_line(line))
        task.add_done_callback(lambda task: self._line_over(line, task))

    @property
    def num_in_flight(self) -> int:
        """Lines that are leased: in the cluster, or waiting to be written."""
        return self.lines.num_leased if self.lines is not None else 0

    def line_bytes(self, line: int) -> int:
        """Length of a line of the input."""
        return self._inspection.index.place(line)[1]

    @property
    def has_pending(self) -> bool:
        """Whether there is something to write."""
        return bool(self._pending) and self._log is not None

    def take_pending(self) -> tuple[DiskLog, list[ResultRecord]]:
        """What to write, and where. Answer with `note_durable` or `note_unwritten`."""
        assert self._log is not None, "written before the log was opened"
        assert not self._is_writing, "written twice at a time"
        records, self._pending, self._is_writing = self._pending, [], True
        return self._log, records

    def note_unwritten(self, records: list[ResultRecord], reason: str) -> None:
        """They could not be written and are pending again."""
        self._pending = records + self._pending
        self._is_writing = False
        self.note_pause(reason)

    @property
    def num_waiting(self) -> int:
        """Lines without a record that are not in the cluster."""
        if self.lines is None:
            return self.record.num_lines or self.record.input_lines
        return self.lines.num_left - self.lines.num_leased

    def note_durable(self, records: list[ResultRecord], log_bytes: int) -> None:
        """These records are on disk, and the log has this length."""
        assert self.lines is not None, "records of no batch"
        for record in records:
            if record.end.is_terminal:
                self.lines.settle(record.line)
            self._totals.add(record)
        self._log_bytes = log_bytes
        self._is_writing = False
        self._is_dirty = True
        self.note_pause(None)
        if self.lines.is_done or self.record.status in _ENDING:
            self._changed.set()

    def note_pause(self, reason: str | None) -> None:
        """Why nothing moves; None: it does."""
        if self.progress.paused != reason:
            self.progress = msgspec.structs.replace(self.progress, paused=reason)
            self._is_dirty = True

    def note_quote(self, quote: Quote) -> None:
        """When it is expected to end. News when the verdict changes, or the last word is old."""
        last = self.progress.quote
        if last is None or last.risk is not quote.risk or quote.quoted_s - last.quoted_s > _QUOTE_S:
            self.progress = msgspec.structs.replace(self.progress, quote=quote)
            self._is_dirty = True

    async def save(self) -> None:
        """Tell the store how far it has come, if that is news. Raises StoreUnavailable."""
        if not self._is_dirty:
            return
        self._is_dirty = False
        before, self.progress = self.progress, self._current_progress()
        try:
            await self._rooms.book.save_progress(self.record.batch_id, self.progress, self._new_files(before))
        except StoreUnavailable:
            self.progress = msgspec.structs.replace(before, paused=self.progress.paused)
            self._is_dirty = True
            raise

    def close(self) -> None:
        """Let go of files and of what runs; the batch can be taken up again."""
        for task in self._tasks.values():
            task.cancel()
        for held in (self._log, self._input):
            if held is not None:
                held.close()
        self._log = self._input = None

    # --- its life

    async def live(self) -> None:
        """From wherever it is to its end."""
        await self._read_input()
        self.note_pause(None)
        if self.record.status is BatchStatus.VALIDATING or (
            self.record.status in _ENDING and not self.record.num_lines
        ):
            problems = self._inspection.end()
            await self._step(Refused(problems) if problems else self._validated())
        if not self.record.is_over and self.record.num_lines:
            await self._open_log()
            await self._run_lines()
            await self._end_lines()
        if not self.record.is_over:
            await self._persist(self._save_finally)

    def _validated(self) -> Validated:
        return Validated(len(self._inspection.index), self._inspection.model)

    async def _read_input(self) -> None:
        reads = read_input(self._rooms.blobs, self.record, self._inspection, self._limits.max_line_bytes)
        async for num_lines in reads:
            self._note_validated(num_lines)

    def _note_validated(self, num_lines: int) -> None:
        if self.record.status is BatchStatus.VALIDATING:
            self.progress = msgspec.structs.replace(self.progress, num_validated=num_lines)
            self._is_dirty = True

    async def _open_log(self) -> None:
        self._input = self._rooms.blobs.open(self.record.input_file_id)
        opened = None
        while opened is None:
            try:
                opened = await opened_log(self._rooms.logs, self.record)
            except StorageError as error:
                self.note_pause(str(error))
                await asyncio.sleep(_STORE_RETRY_S)
        self._log, recovered = opened
        if recovered.num_dropped:
            logger.error("%s: %d damaged records were dropped", self.record.batch_id, recovered.num_dropped)
        self._totals, self._log_bytes = recovered.totals, self._log.num_bytes
        known = (self.record.num_lines, recovered.settled, recovered.num_tries)
        self.lines = LineTracker(*known, max_attempts=self._limits.max_attempts)
        self._is_dirty = True
        self.note_pause(None)
        self.on_change()

    async def _run_lines(self) -> None:
        """Until every line has its record, or the batch is to end without."""
        assert self.lines is not None, "the log is open"
        while not self.lines.is_done and self.record.status is BatchStatus.IN_PROGRESS:
            if time.time() >= self.record.expires_s:
                await self._step(TimePassed())
                continue
            self._changed.clear()
            await _at_most(_LOOK_S, self._changed)

    async def _end_lines(self) -> None:
        """Whatever still runs is given up; what has ended is kept; the rest gets a record saying why it did not."""
        assert self.lines is not None, "the log is open"
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        unrun = self.lines.unsettled()  # looked at from the time when nothing is on its way to the disk
        while not self.lines.is_done:
            if not self._pending and not self._is_writing:
                self._pending = await asyncio.to_thread(self._unrun_records, islice(unrun, _ENDING_LINES))
                self.on_change()
            self._changed.clear()
            await _at_most(_LOOK_S, self._changed)

    def _unrun_records(self, lines: Iterable[int]) -> list[ResultRecord]:
        make = result_lines.expired if self.record.is_expiring else result_lines.cancelled
        return [make(self.record.batch_id, line, self._custom_id(line)) for line in lines]

    async def _save_finally(self) -> None:
        """The last word of its progress, then its last step, with the final sizes of its result files."""
        if self.lines is not None:
            self._is_dirty = True
            await self.save()
        expires_s = time.time() + (self.record.output_lifetime_s or self._limits.file_lifetime_s)
        files = result_files(self.record, self.progress, expires_s)
        self.record = await self._rooms.book.change_batch(
            self.record.batch_id, lambda record: advance(record, AllRecorded(), time.time()), files=files
        )

    async def _step(self, event: BatchEvent) -> None:
        async def take() -> BatchRecord:
            return await self._rooms.book.change_batch(
                self.record.batch_id, lambda record: advance(record, event, time.time())
            )

        self.record = await self._persist(take)

    async def _persist(self, change: Callable[[], Awaitable[T]]) -> T:
        """Until the store has it, however long it is away."""
        while True:
            try:
                return await change()
            except StoreUnavailable:
                await asyncio.sleep(_STORE_RETRY_S)

    # --- lines

    async def _run_line(self, line: int) -> None:
        assert self.lines is not None, "a line of a batch that is not running"
        started_s = time.monotonic()
        request_id = f"{self.record.batch_id.removeprefix('batch_')}{line:06x}-{secrets.token_hex(6)}"
        custom_id, body = parse_line(self._text(line))
        call = LineCall(self.record.endpoint, request_id, body, self._deadline_s())
        try:
            answer = await self._rooms.runner.run(call)
        except LineNotTaken as refusal:
            self.lines.postpone(line, time.monotonic(), refusal.retry_after_s)
            self.on_refusal(refusal.retry_after_s)
        except LineBroken as failure:
            self._broke(line, str(failure))
        else:
            self._pace.ended(time.monotonic() - started_s)
            self._pending.append(result_lines.answered(self.record.batch_id, line, custom_id, request_id, answer))

    def _line_over(self, line: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(line, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.error("%s, line %d: a fault of ours", self.record.batch_id, line, exc_info=error)
            self._broke(line, "The server had an error while processing the request.")
        self.on_change()

    def _broke(self, line: int, reason: str) -> None:
        assert self.lines is not None, "a line of a batch that is not running"
        if self.lines.broke(line, time.monotonic()):
            self._pending.append(result_lines.to_be_tried_again(line))
        else:
            self._pending.append(result_lines.broken(self.record.batch_id, line, self._custom_id(line), reason))

    def _deadline_s(self) -> float:
        assert self.lines is not None, "a line of a batch that is not running"
        time_left_s = self.record.expires_s - time.time()
        return line_deadline_s(time_left_s, self.lines.num_leased, self.lines.num_left, self._pace.line_s)

    def _text(self, line: int) -> bytes:
        assert self._input is not None, "the input is open"
        return self._input.read_at(*self._inspection.index.place(line))

    def _custom_id(self, line: int) -> str:
        return parse_line(self._text(line)).custom_id

    # --- its files

    def _new_files(self, before: Progress) -> list[FileRecord]:
        """Result files that had nothing in them before."""
        known = {file.file_id for file in result_files(self.record, before, None)}
        return [file for file in result_files(self.record, self.progress, None) if file.file_id not in known]

    def _current_progress(self) -> Progress:
        if self.lines is None:
            return msgspec.structs.replace(self.progress, updated_s=time.time())
        return msgspec.structs.replace(
            self.progress,
            counts=self._totals.counts(self.record.num_lines),
            usage=self._totals.usage(),
            num_validated=self.record.num_lines,
            log_bytes=self._log_bytes,
            output_bytes=self._totals.num_bytes[ResultKind.OUTPUT],
            error_bytes=self._totals.num_bytes[ResultKind.ERROR],
            updated_s=time.time(),
        )


async def _at_most(seconds: float, event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
