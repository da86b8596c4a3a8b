"""The life of a batch, step by step."""

from alignedserve.batches.logic import (
    STEPS,
    AllLinesRecorded,
    BatchEvent,
    CancelRequested,
    Validated,
    ValidationFailed,
    WindowExpired,
    advance,
)
from alignedserve.batches.records import TERMINAL, BatchRecord, BatchStatus, LineProblem, Progress, decode
from tests.support.batch_samples import batch_record
from tests.support.marks import each

S = BatchStatus
PROBLEMS = (LineProblem(code="invalid_json_line", message="no", line=3),)


def after(*events: BatchEvent, now: float = 10.0) -> BatchRecord:
    record = batch_record(expires_s=100.0)
    for event in events:
        record = advance(record, event, now)
    return record


def test_a_batch_that_goes_well() -> None:
    record = after(Validated(3, "tiny"))
    assert (record.status, record.num_lines, record.model, record.in_progress_s) == (S.IN_PROGRESS, 3, "tiny", 10.0)
    done = advance(record, AllLinesRecorded(), 20.0)
    assert (done.status, done.finalizing_s, done.completed_s) == (S.COMPLETED, 20.0, 20.0)


def test_a_file_that_cannot_be_run() -> None:
    record = after(ValidationFailed(PROBLEMS))
    assert (record.status, record.problems, record.failed_s) == (S.FAILED, PROBLEMS, 10.0)


def test_cancelled_while_it_runs() -> None:
    record = after(Validated(3, "tiny"), CancelRequested())
    assert (record.status, record.cancelling_s) == (S.CANCELLING, 10.0)
    assert advance(record, AllLinesRecorded(), 11.0).status is S.CANCELLED


def test_cancelled_while_it_is_validated_it_still_learns_its_lines() -> None:
    record = after(CancelRequested(), Validated(3, "tiny"))
    assert (record.status, record.num_lines) == (S.CANCELLING, 3)
    refused = after(CancelRequested(), ValidationFailed(PROBLEMS))
    assert (refused.status, refused.problems) == (S.CANCELLING, PROBLEMS)


def test_its_window_ends() -> None:
    running = after(Validated(3, "tiny"))
    assert advance(running, WindowExpired(), 99.9) is running
    late = advance(running, WindowExpired(), 100.0)
    assert (late.status, late.is_expiring) == (S.FINALIZING, True)
    assert advance(late, AllLinesRecorded(), 101.0).status is S.EXPIRED


def test_its_window_ends_before_it_is_validated() -> None:
    late = after(WindowExpired(), now=100.0)
    assert (late.status, advance(late, Validated(2, "tiny"), 101.0).num_lines) == (S.FINALIZING, 2)


@each("event", [Validated(9, "x"), ValidationFailed(PROBLEMS), CancelRequested(), WindowExpired(), AllLinesRecorded()])
@each("status", [S.FAILED, S.COMPLETED, S.EXPIRED, S.CANCELLED])
def test_what_is_over_stays_over(status: BatchStatus, event: BatchEvent) -> None:
    over = batch_record(status=status, num_lines=3)
    assert advance(over, event, 1e9) is over
    assert not STEPS[status]
    assert status in TERMINAL


def test_a_cancel_comes_too_late_while_finalizing() -> None:
    late = after(Validated(3, "tiny"), WindowExpired(), now=100.0)
    assert advance(late, CancelRequested(), 101.0) is late


def test_a_stored_record_with_a_field_that_is_no_more_is_read() -> None:
    assert decode(b'{"num_validated": 2, "updated_s": 1.5}', Progress) == Progress(num_validated=2)
