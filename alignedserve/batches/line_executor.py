"""Lines of one batch in the cluster: each runs as a task, is retried when it fails, and ends with a result record."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Collection, Container
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

from alignedserve.batches import results
from alignedserve.batches.input_file import InputFile
from alignedserve.batches.interfaces import LineFailed, LineRejected, LineRequest, LineRunner
from alignedserve.batches.line_scheduling import LineDurations, line_deadline_s
from alignedserve.batches.line_tracker import LineTracker
from alignedserve.batches.location import DriverStores
from alignedserve.batches.log.log_format import ResultRecord
from alignedserve.batches.records import BatchRecord
from alignedserve.batches.results import ResultWriter
from alignedserve.batches.schedule import open_time_left
from alignedserve.config.sections import BatchesConfig

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
