"""When a batch may start lines: from `not_before` on, in its hours, and while its owner has not paused it.

A line that has started goes on. Every decision is made from the wall clock of the moment: where it was set an hour
forward or back, the batch begins or stops an hour earlier or later, and no line is lost or run twice.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from alignedserve.batches.hours import ALWAYS, Hours, Schedule, parse_hours
from alignedserve.batches.records import BatchRecord
from alignedserve.core.errors import InvalidRequest

_PAUSED = "paused by its owner"
_HOUR_S, _MINUTE_S = 3600.0, 60.0


def schedule_of(record: BatchRecord) -> Schedule:
    """Return the schedule of a batch. Raises InvalidRequest: its time zone is not known here any more."""
    if record.hours is None and record.not_before_s is None:
        return ALWAYS
    return Schedule(record.not_before_s or 0.0, None if record.hours is None else _hours(record.hours))


def may_start(record: BatchRecord, now: float) -> bool:
    """Return whether a line of the batch may start at this Unix time."""
    if record.paused_s is not None or now >= record.expires_s:
        return False
    try:
        return schedule_of(record).is_open(now)
    except InvalidRequest:
        return False


def open_time_left(record: BatchRecord, now: float) -> float:
    try:
        return schedule_of(record).open_seconds(now, record.expires_s)
    except InvalidRequest:
        return max(0.0, record.expires_s - now)


def reason_to_wait(record: BatchRecord, now: float) -> str | None:
    """Return why no line of the batch starts now, in words for its owner; None: lines may start."""
    if record.paused_s is not None:
        return _PAUSED
    try:
        schedule = schedule_of(record)
    except InvalidRequest as error:
        return str(error)
    if schedule.is_open(now):
        return None
    begins = datetime.fromtimestamp(schedule.after(now, 0.0), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"waits for its hours until {begins}" if now >= schedule.not_before_s else f"waits until {begins}"


def check_window(schedule: Schedule, created_s: float, expires_s: float) -> None:
    """Raise InvalidRequest for a completion window in which no line may start; it names the shortest that will do."""
    if schedule.open_seconds(created_s, expires_s) > 0.0:
        return
    shortest = window_text(schedule.after(created_s, 0.0) + _MINUTE_S - created_s)
    raise InvalidRequest(
        f"No line may start within completion_window: not_before and hours begin later. The shortest is {shortest}.",
        param="completion_window",
        code="invalid_value",
    )


def window_text(seconds: float) -> str:
    """Return a completion window that has at least this many seconds: in minutes up to two hours, else in hours."""
    if seconds <= 2 * _HOUR_S:
        return f"{max(1, math.ceil(seconds / _MINUTE_S))}m"
    return f"{math.ceil(seconds / _HOUR_S)}h"


class Turn(NamedTuple):
    """What decides on the order among batches of one owner."""

    position: int
    owner: str
    priority: int


def by_priority(order: Sequence[Turn]) -> list[int]:
    """Return the positions with the batches of each owner by priority, smaller first, in the places that it has.

    Owners keep their places among each other. Example: A's batches a (priority 0) and b (-5), and B's c, in the order
    a, c, b: b, c, a.
    """
    by_owner: dict[str, list[Turn]] = {}
    for turn in order:
        by_owner.setdefault(turn.owner, []).append(turn)
    sorted_own = {owner: iter(sorted(turns, key=lambda turn: turn.priority)) for owner, turns in by_owner.items()}
    return [next(sorted_own[turn.owner]).position for turn in order]


@lru_cache(maxsize=1024)
def _hours(text: str) -> Hours:
    return parse_hours(text)
