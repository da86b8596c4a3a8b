"""Lines of a batch: leased, run, and those that begin alike one after the other."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.batches.driver import BatchStatistics
from alignedserve.batches.input_lines import CommonBeginnings, InputFile
from alignedserve.batches.interfaces import LineRejected, LineRequest, LineResponse, ModelState
from alignedserve.batches.line_scheduling import LineDurations, LineSlots
from alignedserve.batches.line_tracker import LineTracker
from alignedserve.batches.location import stores_in
from alignedserve.batches.log.disk_log import LineOutcome
from alignedserve.batches.records import Progress
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.batches.results import ResultWriter
from alignedserve.batches.run import BatchRun, LineExecutor, RunContext
from alignedserve.config.sections import BatchesConfig
from tests.support.batch_samples import INPUT, batch_record, chat_line, chat_lines
from tests.support.marks import each
from tests.support.memory_records import MemoryRecords


def test_every_line_is_leased_once() -> None:
    tracker = LineTracker(3, settled=[1], max_attempts=2)
    assert [tracker.lease(0.0), tracker.lease(0.0), tracker.lease(0.0)] == [0, 2, None]
    assert (tracker.num_leased, tracker.num_left, tracker.lease(1e9)) == (2, 2, None)


def test_a_settled_line_is_done() -> None:
    tracker = LineTracker(1, max_attempts=2)
    assert tracker.lease(0.0) == 0
    tracker.settle(0)
    assert (tracker.is_done, tracker.num_leased, list(tracker.unsettled())) == (True, 0, [])
    with pytest.raises(AssertionError):
        tracker.settle(0)


def test_what_was_not_taken_comes_back_after_its_pause_and_first() -> None:
    tracker = LineTracker(3, max_attempts=2)
    assert tracker.lease(0.0) == 0
    tracker.postpone(0, 0.0, 5.0)
    assert tracker.lease(4.9) == 1
    assert tracker.lease(5.0) == 0
    assert tracker.lease(5.0) == 2


def test_what_breaks_is_tried_a_few_times_with_growing_pauses() -> None:
    tracker = LineTracker(1, max_attempts=3)
    assert tracker.lease(0.0) == 0
    assert tracker.retry(0, 0.0)
    assert (tracker.lease(0.4), tracker.lease(0.5)) == (None, 0)
    assert tracker.retry(0, 0.5)
    assert (tracker.lease(1.4), tracker.lease(1.5)) == (None, 0)
    assert not tracker.retry(0, 1.5)
    assert (tracker.num_leased, tracker.lease(100.0)) == (1, None)  # until its record is written
    tracker.settle(0)
    assert tracker.is_done


def test_a_line_may_be_tried_thousands_of_times() -> None:
    tracker = LineTracker(1, max_attempts=5000)
    for attempt in range(4999):
        assert tracker.lease(attempt * 100.0) == 0
        assert tracker.retry(0, attempt * 100.0)
    assert tracker.lease(1e6) == 0
    assert not tracker.retry(0, 1e6)


def test_a_line_that_breaks_its_worker_each_time_takes_no_others_along_until_they_fail() -> None:
    tracker, breaking = LineTracker(8, max_attempts=8), 3
    running: dict[int, float] = {}  # and when they end
    failed = set()
    for now in (tick / 10 for tick in range(2000)):
        while (line := tracker.lease(now)) is not None:
            running[line] = now + 1.0
        if breaking in running:
            failed |= {line for line in running if not tracker.retry(line, now)}
            running.clear()
        for line in [line for line, end_s in running.items() if end_s <= now]:
            tracker.settle(line)
            del running[line]
    assert failed == {breaking}
    assert tracker.num_settled == 7


def test_what_is_rejected_each_time_is_tried_less_and_less_often() -> None:
    tracker, now, pauses = LineTracker(1, max_attempts=2), 0.0, []
    for _ in range(6):
        assert tracker.lease(now) == 0
        tracker.reject(0, now, 1.0)
        pauses.append(next(pause_s for pause_s in (1.0, 2.0, 4.0, 8.0) if tracker.lease(now + pause_s) == 0))
        tracker.postpone(0, now, pauses[-1])
        now += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_not_being_taken_counts_no_try() -> None:
    tracker = LineTracker(1, max_attempts=2)
    for second in range(10):
        assert tracker.lease(float(second)) == 0
        tracker.postpone(0, float(second), 1.0)
    assert tracker.lease(10.0) == 0
    assert tracker.retry(0, 10.0)


@each("settled", [range(3), (1, 2)])
def test_what_was_settled_before_a_crash_is_never_due(settled: Iterable[int]) -> None:
    tracker = LineTracker(3, settled, max_attempts=2)
    untouched = [line for line in range(3) if line not in settled]
    assert [tracker.lease(0.0) for _ in range(4)] == untouched + [None] * (4 - len(untouched))


def test_lines_of_a_paused_model_wait_for_it_and_hold_up_no_others() -> None:
    tracker = LineTracker(4, max_attempts=2)
    for line in (0, 1):
        assert tracker.lease(0.0, {"a"}) == line
        tracker.park(line, "a")
    assert [tracker.lease(0.0, {"a"}) for _ in range(3)] == [2, 3, None]
    assert (tracker.num_leased, tracker.num_left) == (2, 4)
    assert [tracker.lease(0.0) for _ in range(3)] == [0, 1, None]


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

    def may_use(self, owner: str, name: str) -> bool:
        return True

    def model_of(self, name: str) -> str:
        return name

    def on_progress(self) -> None:
        self.ended.set()

    def on_rejection(self, model: str, retry_after_s: float) -> None:
        self.rejections.append((model, retry_after_s))


@asynccontextmanager
async def lines_of(folder: Path, failing: Failing, num_lines: int, content: bytes) -> AsyncIterator[LineExecutor]:
    config, stores = BatchesConfig(), stores_in(folder, MemoryRecords())
    blob = await stores.blobs.begin(INPUT)
    await blob.write(content)
    await blob.commit()
    record = batch_record(num_lines=num_lines, expires_s=1e12)
    input_file = InputFile(record, stores.blobs, config, ("tiny",))
    async for _ in input_file.scan():
        pass
    await input_file.open()
    log, recovered = stores.logs.open(record.batch_id, num_lines)
    context = RunContext(stores, failing, config, ("tiny",), LineDurations(), failing)
    tracker, writer = LineTracker(num_lines, max_attempts=2), ResultWriter(log, recovered.totals)
    yield LineExecutor(record, context, input_file=input_file, tracker=tracker, writer=writer)
    writer.close()
    input_file.close()


@asynccontextmanager
async def executing(folder: Path, failing: Failing) -> AsyncIterator[LineExecutor]:
    """Start the one line of a batch and wait until it has ended."""
    async with lines_of(folder, failing, 1, chat_line()) as executor:
        assert executor.start_line(0.0)
        await failing.ended.wait()
        yield executor


async def test_few_long_lines_of_a_paused_model_are_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is read and parsed on the driver's loop, which serves all gateways' records."""
    num_read, read = 0, InputFile.model

    def noting(input_file: InputFile, line: int) -> str:
        nonlocal num_read
        num_read += 1
        return read(input_file, line)

    monkeypatch.setattr(InputFile, "model", noting)
    content = chat_lines(10, messages=[{"content": "x" * 300_000}])
    async with lines_of(tmp_path, Failing(ValueError()), 10, content) as executor:
        assert not executor.start_line(0.0, {"tiny"})
    assert num_read == 4


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


def test_very_many_batches_are_estimated_in_turn(tmp_path: Path) -> None:
    """Each looks at all others: 1 000 at once would hold up the driver and all records for half a second."""
    config, stores = BatchesConfig(), stores_in(tmp_path, MemoryRecords())
    failing = Failing(LineRejected("", retry_after_s=1.0))
    context = RunContext(stores, failing, config, ("tiny",), LineDurations(), failing)
    runs = [BatchRun(BatchSnapshot(batch_record(), Progress()), context) for _ in range(150)]
    statistics = BatchStatistics(stores.repository, config.assumed_tokens_per_s)
    num_estimated = []
    for now in (10.0, 10.5, 11.0):
        statistics.estimate_etas(runs, LineSlots({}), now)
        num_estimated.append(sum(run.progress.eta is not None for run in runs))
    assert num_estimated == [64, 128, 150]


def line(number: int, *texts: str) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"custom_id": f"c{number}", "body": {"temperature": number, "messages": messages}}).encode()


def order_of(*lines: bytes) -> list[int]:
    beginnings = CommonBeginnings()
    for text in lines:
        beginnings.add(text)
    return list(beginnings.order())


def document(name: str, num_chars: int = 400) -> str:
    return name * num_chars


def test_lines_of_one_document_stand_together() -> None:
    lines = [line(number, document("ab"[number % 2]), f"question {number}") for number in range(6)]
    assert order_of(*lines) == [0, 2, 4, 1, 3, 5]


def test_longer_beginnings_stand_together_within_shorter_ones() -> None:
    common = document("x", 1100)
    lines = [line(number, common + document("ab"[number % 2], 4000)) for number in range(4)]
    lines.insert(2, line(9, common))
    lines.insert(1, line(8, document("y")))
    assert order_of(*lines) == [0, 4, 2, 5, 3, 1]


def test_different_lines_stay_in_the_order_of_the_file() -> None:
    assert order_of(*(line(number, f"{number}" * 100) for number in range(5))) == [0, 1, 2, 3, 4]
    assert order_of(b"no prompt at all", b"nor here") == [0, 1]
    assert order_of() == []


def test_prompts_of_completions_are_compared_as_well() -> None:
    prompts = [[7] * 200, [8] * 200, [7] * 200]
    assert order_of(*(json.dumps({"id": n, "prompt": prompt}).encode() for n, prompt in enumerate(prompts))) == [
        0,
        2,
        1,
    ]


@given(seed=st.integers(0, 10**6))
def test_an_order_has_every_line_once_and_keeps_groups_together(seed: int) -> None:
    rng = random.Random(seed)
    documents = [document(chr(97 + rng.randrange(4)), 300) for _ in range(rng.randrange(1, 20))]
    order = order_of(*(line(number, text) for number, text in enumerate(documents)))
    assert sorted(order) == list(range(len(documents)))
    in_order = [documents[number] for number in order]
    assert sum(one != other for one, other in pairwise(in_order)) == len(set(documents)) - 1


def test_lines_are_leased_in_that_order_but_for_those_that_are_done() -> None:
    tracker = LineTracker(4, settled=[2], max_attempts=2, order=[3, 2, 0, 1])
    assert [tracker.lease(0.0) for _ in range(4)] == [3, 0, 1, None]
