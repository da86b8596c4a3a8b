"""The life of a batch: which state follows which, and when.

1. validating: its lines are read. Any line that could not be run as a line makes the batch `failed`.
2. in_progress: lines run. Every one of them ends with exactly one record in the result log.
3. finalizing: every line has its record, or the window is over and the missing ones are being written as expired.
4. completed, or expired.
A client's cancel leads through cancelling, while what is missing is written as cancelled, to cancelled.
Whatever is asked of a batch in a state where it means nothing changes nothing. A step of the table is the only way on.
"""

from dataclasses import dataclass

import msgspec

from alignedserve.batches.records import BatchRecord, BatchStatus, LineProblem

S = BatchStatus
STEPS: dict[BatchStatus, frozenset[BatchStatus]] = {
    S.VALIDATING: frozenset({S.FAILED, S.IN_PROGRESS, S.FINALIZING, S.CANCELLING}),
    S.IN_PROGRESS: frozenset({S.FINALIZING, S.CANCELLING}),
    S.FINALIZING: frozenset({S.COMPLETED, S.EXPIRED}),
    S.CANCELLING: frozenset({S.CANCELLED}),
    S.FAILED: frozenset(),
    S.COMPLETED: frozenset(),
    S.EXPIRED: frozenset(),
    S.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Validated:
    """Every line was read."""

    num_lines: int
    model: str | None


@dataclass(frozen=True, slots=True)
class Refused:
    """The file cannot be run as a batch."""

    problems: tuple[LineProblem, ...]


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """Its owner wants no more of it."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A look at the clock."""


@dataclass(frozen=True, slots=True)
class AllRecorded:
    """Every line has its durable record, or there is none that could have one."""


BatchEvent = Validated | Refused | CancelAsked | TimePassed | AllRecorded


def advance(record: BatchRecord, event: BatchEvent, now: float) -> BatchRecord:
    """The record after this event; the same object when the event changes nothing."""
    match event:
        case Validated(num_lines, model):
            return _validated(record, num_lines, model, now)
        case Refused(problems) if record.status is S.VALIDATING:
            return _step(record, S.FAILED, problems=problems, failed_s=now)
        case Refused(problems) if record.status in (S.CANCELLING, S.FINALIZING) and not record.num_lines:
            return msgspec.structs.replace(record, problems=problems)
        case CancelAsked() if record.status in (S.VALIDATING, S.IN_PROGRESS):
            return _step(record, S.CANCELLING, cancelling_s=now)
        case TimePassed() if record.status in (S.VALIDATING, S.IN_PROGRESS) and now >= record.expires_s:
            return _step(record, S.FINALIZING, finalizing_s=now, is_expiring=True)
        case AllRecorded():
            return _all_recorded(record, now)
    return record


def _validated(record: BatchRecord, num_lines: int, model: str | None, now: float) -> BatchRecord:
    if record.status is S.VALIDATING:
        return _step(record, S.IN_PROGRESS, num_lines=num_lines, model=model, in_progress_s=now)
    if record.status in (S.CANCELLING, S.FINALIZING) and not record.num_lines:
        return msgspec.structs.replace(record, num_lines=num_lines, model=model)
    return record


def _all_recorded(record: BatchRecord, now: float) -> BatchRecord:
    match record.status:
        case S.IN_PROGRESS:
            finalizing = _step(record, S.FINALIZING, finalizing_s=now)
            return _step(finalizing, S.COMPLETED, completed_s=now)
        case S.FINALIZING if record.is_expiring:
            return _step(record, S.EXPIRED, expired_s=now)
        case S.FINALIZING:
            return _step(record, S.COMPLETED, completed_s=now)
        case S.CANCELLING:
            return _step(record, S.CANCELLED, cancelled_s=now)
    return record


def _step(record: BatchRecord, status: BatchStatus, **changes: object) -> BatchRecord:
    assert status in STEPS[record.status], f"a batch cannot go from {record.status} to {status}"
    return msgspec.structs.replace(record, status=status, **changes)
