"""Runs one batch from its input file to its result files.

1. `InputFile` is scanned: every line is validated, or only indexed if the batch was validated before.
2. The result log is opened: lines with a durable record are done and never run again.
3. `LineExecutor` runs the other lines as the driver starts them; `ResultWriter` writes their records.
4. Lines that cannot run any more (the batch was cancelled or has expired) get a record that says so.
5. The repository stores the final progress, the result files and the final status.

Everything in memory follows from the input file and the result log, so another driver can resume after a crash.

Lines of one batch in the cluster: each runs as a task, is retried when it fails, and ends with a result record."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import islice
from typing import Protocol, TypeVar

import msgspec

from alignedserve.batches import results
from alignedserve.batches.eta import RemainingWork, Throughputs, remaining_work
from alignedserve.batches.hours import may_start, open_time_left
from alignedserve.batches.input_lines import InputFile
from alignedserve.batches.interfaces import LineFailed, LineRejected, LineRequest, LineRunner
from alignedserve.batches.line_scheduling import LineDurations, ReadyBatch, line_deadline_s
from alignedserve.batches.line_tracker import LineTracker
from alignedserve.batches.location import DriverStores
from alignedserve.batches.log.disk_log import DiskLog, RecoveredLog, ResultRecord
from alignedserve.batches.logic import STEPS, AllLinesRecorded, BatchEvent, WindowExpired, advance
from alignedserve.batches.records import BatchRecord, BatchStatus, Eta, Progress, ResultKind, client_of
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.batches.results import ResultWriter
from alignedserve.config.sections import BatchesConfig
from alignedserve.core.errors import StorageDamaged, StorageError, StoreUnavailable
from alignedserve.keys.ring import KeyRing
from alignedserve.usage.records import BATCH, SEVERAL_MODELS, UsageCounts, UsageSubject

logger = logging.getLogger(__name__)

_MAX_PARKED_BYTES = 1 << 20  # of lines at a time whose models are paused: each is read
_LINE_BYTES = 4096  # what that costs beside the bytes of a line
_SERVER_ERROR = "The server had an error while processing the request."


class RunListener(Protocol):
    """Receives the events of batch runs on which the driver acts at once."""

    def on_progress(self) -> None:
        """Note that a line has ended, results are pending, or lines can be started."""

    def on_rejection(self, model: str, retry_after_s: float) -> None:
        """Note that this model has rejected a line, and is to be asked again after this long."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """Stores, line runner and limits of all runs, their shared state, and the driver that listens to them."""

    stores: DriverStores
    runner: LineRunner
    config: BatchesConfig
    models: Container[str]  # served here
    line_durations: LineDurations
    listener: RunListener
    num_answered: Counter[str] = field(default_factory=Counter)  # lines, by the model that ran them


class LineExecutor:
    """Starts lines on request and passes their records to the writer."""

    def __init__(
        self,
        record: BatchRecord,
        context: RunContext,
        *,
        input_file: InputFile,
        tracker: LineTracker,
        writer: ResultWriter,
    ) -> None:
        self.tracker = tracker
        self.writer = writer
        self._record = record  # only what never changes
        self._context = context
        self._input_file = input_file
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._models: dict[int, str] = {}  # that run them

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def num_running_of(self, models: Container[str]) -> int:
        return sum(model in models for model in self._models.values())

    def start_line(self, now: float, paused: Collection[str] = ()) -> bool:
        """Start the next line; False: none is due. `paused`: models whose lines wait, and hold up no others."""
        line = self._lease(now, paused)
        if line is None:
            return False
        task = self._tasks[line] = asyncio.create_task(self._run_line(line))
        task.add_done_callback(lambda task: self._on_line_ended(line, task))
        return True

    def model_of(self, line: int) -> str:
        return self._context.runner.model_of(self._record.model or self._input_file.model(line))

    def _lease(self, now: float, paused: Collection[str]) -> int | None:
        num_bytes = 0
        while num_bytes < _MAX_PARKED_BYTES:
            line = self.tracker.lease(now, paused)
            if line is None or not paused or (model := self.model_of(line)) not in paused:
                return line
            self.tracker.park(line, model)
            num_bytes += _LINE_BYTES + self._input_file.line_bytes(line)
        return None

    async def write_results(self) -> list[ResultRecord]:
        """Write and return every pending record; lines with a terminal one are done. Raises StorageError."""
        records = await self.writer.write()
        for record in records:
            if record.outcome.is_terminal:
                self.tracker.settle(record.line)
        return records

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel every line in the cluster; return the tasks that are about to end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        return tasks

    async def _run_line(self, line: int) -> None:
        started_s, batch_id = time.monotonic(), self._record.batch_id
        request_id = f"{batch_id.removeprefix('batch_')}{line:06x}-{secrets.token_hex(6)}"
        custom_id, body = self._input_file.line(line)
        model = self._models[line] = self._context.runner.model_of(str(body.get("model", "")))
        request = LineRequest(
            self._record.endpoint,
            request_id,
            body,
            self._record.owner,
            self._deadline_s(model),
            results.line_id(batch_id, line),
        )
        try:
            response = await self._context.runner.run(request)
        except LineRejected as rejection:
            self.tracker.reject(line, time.monotonic(), rejection.retry_after_s)
            self._context.listener.on_rejection(model, rejection.retry_after_s)
        except LineFailed as failure:
            self._retry_or_fail(line, str(failure))
        else:
            self._context.line_durations.add(model, time.monotonic() - started_s)
            self._context.num_answered[model] += response.status_code == HTTPStatus.OK  # others may be of our own
            self.writer.add(results.response_record(batch_id, line, custom_id, request_id, response))

    def _on_line_ended(self, line: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(line, None)
        self._models.pop(line, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.error("%s, line %d: internal error", self._record.batch_id, line, exc_info=error)
            self._retry_or_fail(line, _SERVER_ERROR)
        self._context.listener.on_progress()

    def _retry_or_fail(self, line: int, reason: str) -> None:
        if self.tracker.retry(line, time.monotonic()):
            self.writer.add(results.retry_record(line))
        else:
            custom_id = self._input_file.custom_id(line)
            self.writer.add(results.failed_record(self._record.batch_id, line, custom_id, reason))

    def _deadline_s(self, model: str) -> float:
        time_left_s = open_time_left(self._record, time.time())
        mean_s = self._context.line_durations.mean_s(model)
        return line_deadline_s(time_left_s, self.tracker.num_leased, self.tracker.num_left, mean_s)


_STORE_RETRY_S = 0.5
_POLL_S = 0.25
_ETA_S = 2.0  # an older estimate is stored again
_ENDING_LINES = 4000  # records of lines that never ran, written at a time
_ENDING = frozenset({BatchStatus.CANCELLING, BatchStatus.FINALIZING})

T = TypeVar("T")


class _UsableModels:
    def __init__(self, context: RunContext, owner: str) -> None:
        self._context = context
        self._owner = owner

    def __contains__(self, name: object) -> bool:
        return name in self._context.models and self._context.runner.may_use(self._owner, str(name))


class BatchRun:
    """Await `run` once. Meanwhile the driver starts lines, writes results and saves progress."""

    def __init__(self, snapshot: BatchSnapshot, context: RunContext) -> None:
        self.record = snapshot.record
        self.progress = snapshot.progress
        self._context = context
        models = _UsableModels(context, snapshot.record.owner)
        self._input_file = InputFile(snapshot.record, context.stores.blobs, context.config, models)
        self._lines: LineExecutor | None = None  # from the opening of the log on
        self._changed = asyncio.Event()
        self._is_dirty = False
        self._saving = asyncio.Lock()
        self._has_left = False  # to its next run
        self._counted = UsageCounts()  # as this run knows
        self._listed = {file.file_id for file in results.result_files(snapshot.record, snapshot.progress, None)}

    # --- called by the driver

    def update(self, record: BatchRecord) -> None:
        """Take over the stored record: a client may have cancelled, paused or resumed the batch. One that was read
        before this run's own last change, and comes late, is left."""
        if record.status in STEPS[self.record.status]:
            self.record = record
            self._changed.set()
        elif record.status is self.record.status and record.paused_s != self.record.paused_s:
            self.record = msgspec.structs.replace(self.record, paused_s=record.paused_s)

    def model_shares(self) -> dict[str, float]:
        """Return the part of its lines that each model runs; a line that names an adapter counts for its model."""
        shares: dict[str, float] = {}
        for name, share in self.record.model_shares().items():
            model = self._context.runner.model_of(name)
            shares[model] = shares.get(model, 0.0) + share
        return shares

    def model_of_line(self, line: int) -> str:
        assert self._lines is not None, "lines before the log was opened"
        return self._lines.model_of(line)

    def remaining_work(self, throughputs: Throughputs) -> RemainingWork:
        return remaining_work(self.record, self._current_progress(), throughputs, self.model_shares())

    def ready_batch(self, position: int, throughputs: Throughputs, wall_s: float) -> ReadyBatch | None:
        """Return what decides on this batch's turn, or None while it has no lines to run."""
        if self._lines is None or self.record.status is not BatchStatus.IN_PROGRESS:
            return None
        if not may_start(self.record, wall_s):
            return None
        work_s = self.remaining_work(throughputs).seconds(throughputs)
        expires_s = wall_s + open_time_left(self.record, wall_s)  # as if its hours that are left were one
        return ReadyBatch(position, expires_s, work_s, self.record.created_s)

    def start_line(self, now: float, wall_s: float, paused: Collection[str]) -> bool:
        """Start the next line; False: none is due now. `paused`: models that take no lines."""
        if self._lines is None or self.record.status is not BatchStatus.IN_PROGRESS:
            return False
        return may_start(self.record, wall_s) and self._lines.start_line(now, paused)

    @property
    def num_in_flight(self) -> int:
        return self._lines.tracker.num_leased if self._lines is not None else 0

    @property
    def num_running(self) -> int:
        return self._lines.num_running if self._lines is not None else 0

    def num_running_of(self, models: Container[str]) -> int:
        return self._lines.num_running_of(models) if self._lines is not None else 0

    @property
    def num_waiting(self) -> int:
        if self._lines is None:
            return self.record.num_lines or self.record.input_lines
        return self._lines.tracker.num_left - self._lines.tracker.num_leased

    def line_bytes(self, line: int) -> int:
        return self._input_file.line_bytes(line)

    @property
    def has_pending(self) -> bool:
        return self._lines is not None and self._lines.writer.has_pending

    async def write_results(self) -> list[ResultRecord]:
        """Write and return every pending record. Raises StorageError: the batch pauses, they are pending again."""
        assert self._lines is not None, "results before the log was opened"
        try:
            records = await self._lines.write_results()
        except StorageError as error:
            self.set_paused(str(error))
            raise
        self._is_dirty = True
        self.set_paused(None)
        if self._lines.tracker.is_done or self.record.status in _ENDING:
            self._changed.set()
        return records

    def set_paused(self, reason: str | None) -> None:
        if self.progress.paused != reason:
            self.progress = msgspec.structs.replace(self.progress, paused=reason)
            self._is_dirty = True

    def set_eta(self, eta: Eta) -> None:
        """Keep a new estimate if its verdict changed or the last one is old."""
        last = self.progress.eta
        if last is None or last.risk is not eta.risk or eta.estimated_s - last.estimated_s > _ETA_S:
            self.progress = msgspec.structs.replace(self.progress, eta=eta)
            self._is_dirty = True

    async def save(self) -> None:
        """Store the progress if it has changed. Raises StoreUnavailable."""
        async with self._saving:
            if not self._is_dirty or self._has_left:
                return
            self._is_dirty = False
            self.progress = self._current_progress()
            files = results.result_files(self.record, self.progress, None)
            new = [file for file in files if file.file_id not in self._listed]
            try:
                await self._context.stores.repository.save_progress(self.record.batch_id, self.progress, new)
                await self._count_usage()
            except StoreUnavailable:
                self._is_dirty = True
                raise
            self._listed |= {file.file_id for file in new}

    async def leave(self) -> None:
        """Save nothing more: the batch's next run does, which may begin once what is being saved is there."""
        async with self._saving:
            self._has_left = True

    async def _count_usage(self) -> None:
        progress, owner = self.progress, KeyRing().owned_by(client_of(self.record.owner)).name
        model = self.record.model or (SEVERAL_MODELS if self.record.num_lines else "")
        usage = progress.usage
        counts = UsageCounts(
            progress.counts.completed, usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.compute_us
        )
        if counts != self._counted:
            subject = UsageSubject(owner, model, BATCH)
            await self._context.stores.repository.usage.count_batch(self.record.batch_id, subject, counts, time.time())
            self._counted = counts

    def close(self) -> None:
        if self._lines is not None:
            self._lines.cancel()
            self._lines.writer.close()
        self._input_file.close()

    # --- from beginning to end

    async def run(self) -> None:
        async for num_lines in self._input_file.scan():
            if self.record.status is BatchStatus.VALIDATING:
                self.progress = msgspec.structs.replace(self.progress, num_validated=num_lines)
                self._is_dirty = True
        self.set_paused(None)
        if self.record.status is BatchStatus.VALIDATING or (
            self.record.status in _ENDING and not self.record.num_lines
        ):
            await self._advance(self._input_file.validation())
        if not self.record.is_over and self.record.num_lines:
            lines = await self._open_lines()
            while not lines.tracker.is_done and self.record.status is BatchStatus.IN_PROGRESS:
                if not await self._expires():
                    await self._wait_for_change()
            await asyncio.gather(*lines.cancel(), return_exceptions=True)
            missing = lines.tracker.unsettled()  # evaluated lazily, once nothing else is being written
            while not lines.tracker.is_done:
                if lines.writer.is_idle:
                    lines.writer.add(*await asyncio.to_thread(self._missing_records, islice(missing, _ENDING_LINES)))
                    self._context.listener.on_progress()
                await self._wait_for_change()
        if not self.record.is_over:
            await self.persist(self._finish)

    async def _open_input(self) -> Sequence[int] | None:
        """Open the input file; return the order of its lines. None: it is damaged, and no line is to run any more.
        Raises StorageDamaged while lines would run: the batch waits for its file until it is cancelled or expires."""
        try:
            await self._input_file.open()
        except StorageDamaged:
            if not self.record.is_ending and not await self._expires():
                raise
            return None
        return self._input_file.order()

    async def _open_lines(self) -> LineExecutor:
        order = await self._open_input()
        log, recovered = await self._open_log()
        if recovered.num_dropped:
            logger.error("%s: %d damaged records were dropped", self.record.batch_id, recovered.num_dropped)
        known = (self.record.num_lines, recovered.settled, recovered.num_attempts)
        self._lines = LineExecutor(
            self.record,
            self._context,
            input_file=self._input_file,
            tracker=LineTracker(*known, max_attempts=self._context.config.max_attempts, order=order),
            writer=ResultWriter(log, recovered.totals),
        )
        self._is_dirty = True
        self.set_paused(None)
        self._context.listener.on_progress()
        return self._lines

    async def _open_log(self) -> tuple[DiskLog, RecoveredLog]:
        while True:
            try:
                return await self._context.stores.logs.open_in_thread(self.record.batch_id, self.record.num_lines)
            except StorageError as error:
                self.set_paused(str(error))
                await asyncio.sleep(_STORE_RETRY_S)

    async def _expires(self) -> bool:
        """Return True if the window is over; the batch is expiring from then on, unless it was cancelled. False where
        the clock was set back meanwhile."""
        if time.time() >= self.record.expires_s:
            await self._advance(WindowExpired())
        return self.record.is_ending

    def _missing_records(self, lines: Iterable[int]) -> list[ResultRecord]:
        make = results.expired_record if self.record.is_expiring else results.cancelled_record
        return [make(self.record.batch_id, line, self._input_file.custom_id(line)) for line in lines]

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._changed.wait()

    async def _finish(self) -> None:
        if self._lines is not None:
            self._is_dirty = True
            await self.save()
        expires_s = time.time() + (self.record.output_lifetime_s or self._context.config.file_lifetime_s)
        files = results.result_files(self.record, self.progress, expires_s)
        self.record = await self._context.stores.repository.change_batch(
            self.record.batch_id, lambda record: advance(record, AllLinesRecorded(), time.time()), files=files
        )

    async def _advance(self, event: BatchEvent) -> None:
        self.record = await self.persist(
            lambda: self._context.stores.repository.change_batch(
                self.record.batch_id, lambda record: advance(record, event, time.time())
            )
        )

    async def persist(self, change: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await change()
            except StoreUnavailable as error:
                self.set_paused(str(error))
                await asyncio.sleep(_STORE_RETRY_S)

    # --- progress

    def _current_progress(self) -> Progress:
        if self._lines is None:
            return self.progress
        writer = self._lines.writer
        return msgspec.structs.replace(
            self.progress,
            counts=writer.totals.counts(self.record.num_lines),
            usage=writer.totals.usage(),
            num_validated=self.record.num_lines,
            log_bytes=writer.log_bytes,
            output_bytes=writer.totals.num_bytes[ResultKind.OUTPUT],
            error_bytes=writer.totals.num_bytes[ResultKind.ERROR],
        )
