"""Running lines: outcomes that are no response."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from alignedserve.batches.input_file import InputFile
from alignedserve.batches.interfaces import LineRejected, LineRequest, LineResponse, ModelState
from alignedserve.batches.line_executor import LineExecutor, RunContext
from alignedserve.batches.line_scheduling import LineDurations
from alignedserve.batches.line_tracker import LineTracker
from alignedserve.batches.location import stores_in
from alignedserve.batches.log.log_format import LineOutcome
from alignedserve.batches.result_writer import ResultWriter
from alignedserve.batches.stores.memory_records import MemoryRecords
from alignedserve.config.sections import BatchesConfig
from tests.support.batch_samples import INPUT, batch_record, chat_line


class Failing:
    """A LineRunner that raises, and the listener of the executor."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.rejections: list[tuple[str, float]] = []
        self.ended = asyncio.Event()

    async def run(self, request: LineRequest) -> LineResponse:
        raise self._error

    def model_states(self) -> dict[str, ModelState]:
        return {}

    def model_of(self, name: str) -> str:
        return name

    def on_progress(self) -> None:
        self.ended.set()

    def on_rejection(self, model: str, retry_after_s: float) -> None:
        self.rejections.append((model, retry_after_s))


@asynccontextmanager
async def executing(folder: Path, failing: Failing) -> AsyncIterator[LineExecutor]:
    """Start the one line of a batch and wait until it has ended."""
    config, stores = BatchesConfig(), stores_in(folder, MemoryRecords())
    blob = await stores.blobs.begin(INPUT)
    await blob.write(chat_line())
    await blob.commit()
    record = batch_record(num_lines=1, expires_s=1e12)
    input_file = InputFile(record, stores.blobs, config, ("tiny",))
    assert [count async for count in input_file.scan()] == [0]
    await input_file.open()
    log, recovered = stores.logs.open(record.batch_id, 1)
    context = RunContext(stores, failing, config, ("tiny",), LineDurations(), failing)
    tracker, writer = LineTracker(1, max_attempts=2), ResultWriter(log, recovered.totals)
    executor = LineExecutor(record, context, input_file=input_file, tracker=tracker, writer=writer)
    assert executor.start_line(0.0)
    await failing.ended.wait()
    yield executor
    writer.close()
    input_file.close()


async def test_an_internal_error_is_a_failed_attempt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with executing(tmp_path, Failing(RuntimeError("a bug"))) as executor:
        assert [record.outcome for record in await executor.write_results()] == [LineOutcome.RETRY]
        assert executor.tracker.num_leased == 0
    assert "line 0: internal error" in caplog.text


async def test_a_rejected_line_is_no_attempt_and_the_driver_learns_of_it(tmp_path: Path) -> None:
    failing = Failing(LineRejected("full", retry_after_s=7.0))
    async with executing(tmp_path, failing) as executor:
        assert (failing.rejections, executor.writer.has_pending, executor.tracker.num_leased) == (
            [("tiny", 7.0)],
            False,
            0,
        )
