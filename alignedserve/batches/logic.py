"""Lifecycle of a batch: the legal steps between its states.

1. validating: its lines are read. An invalid line makes the batch `failed`.
2. in_progress: lines run. Each of them ends with exactly one terminal record in the result log.
3. finalizing: every line has its record, or the window has expired and the missing records are being written.
4. completed, or expired.
A client may pause a batch that is not over: no line starts until it is resumed, and its window goes on.
A client's cancel leads through cancelling, while the missing records are being written, to cancelled.
An event that has no meaning in the present state changes nothing. Every change is a step of the table."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """Every line is valid."""

    num_lines: int
    model: str | None  # of all lines; None: they name several
    lines_by_model: Mapping[str, int] = field(default_factory=dict)  # where they do


@dataclass(frozen=True, slots=True)
class ValidationFailed:
    """The file is not a valid batch."""

    problems: tuple[LineProblem, ...]


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The owner asked to cancel the batch."""


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """The owner asked that no more lines start."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """The owner asked that lines start again."""


@dataclass(frozen=True, slots=True)
class WindowExpired:
    """The completion window has expired, unless `now` says otherwise."""


@dataclass(frozen=True, slots=True)
class AllLinesRecorded:
    """Every line has its durable record; a batch without valid lines has none."""


BatchEvent = (
    Validated | ValidationFailed | CancelRequested | PauseRequested | ResumeRequested | WindowExpired | AllLinesRecorded
)


def advance(record: BatchRecord, event: BatchEvent, now: float) -> BatchRecord:
    """Return the record after an event; the same object if the event changes nothing."""
    match event:
        case Validated():
            known = {"num_lines": event.num_lines, "model": event.model, "lines_by_model": dict(event.lines_by_model)}
            if record.status is S.VALIDATING:
                return _step(record, S.IN_PROGRESS, **known, in_progress_s=now)
            if record.status in (S.CANCELLING, S.FINALIZING) and not record.num_lines:
                return msgspec.structs.replace(record, **known)
            return record
        case ValidationFailed(problems) if record.status is S.VALIDATING:
            return _step(record, S.FAILED, problems=problems, failed_s=now)
        case ValidationFailed(problems) if record.status in (S.CANCELLING, S.FINALIZING) and not record.num_lines:
            return msgspec.structs.replace(record, problems=problems)
        case CancelRequested() if record.status in (S.VALIDATING, S.IN_PROGRESS):
            return _step(record, S.CANCELLING, cancelling_s=now)
        case PauseRequested() if record.paused_s is None and record.status in (S.VALIDATING, S.IN_PROGRESS):
            return msgspec.structs.replace(record, paused_s=now)
        case ResumeRequested() if record.paused_s is not None and record.status in (S.VALIDATING, S.IN_PROGRESS):
            return msgspec.structs.replace(record, paused_s=None)
        case WindowExpired() if record.status in (S.VALIDATING, S.IN_PROGRESS) and now >= record.expires_s:
            return _step(record, S.FINALIZING, finalizing_s=now, is_expiring=True)
        case AllLinesRecorded():
            return _finish(record, now)
    return record


def _finish(record: BatchRecord, now: float) -> BatchRecord:
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
