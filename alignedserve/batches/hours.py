"""Hours in which best-effort work may start: windows of wall clock time in a time zone, on some days of the week.

    22:00-06:00 Europe/Berlin
    Mon-Fri 22:00-06:00, Sat 00:00-24:00, Sun 00:00-24:00 Europe/Berlin

A window belongs to the day on which it begins; one whose end is not after its start ends on the next day. Where clocks
are changed, a window begins at the first moment and ends at the first moment at which the clock shows that time or a
later one. So the night of 22:00 to 06:00 has 7 hours in spring and 9 in autumn.

When a batch may start lines: from `not_before` on, in its hours, and while its owner has not paused it.

A line that has started goes on. Every decision is made from the wall clock of the moment: where it was set an hour
forward or back, the batch begins or stops an hour earlier or later, and no line is lost or run twice."""

import math
import re
import zoneinfo
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import NamedTuple

from alignedserve.batches.records import BatchRecord
from alignedserve.core.errors import InvalidRequest

MAX_HOURS_LEN = 256
_MAX_WINDOWS = 16
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES = 24 * 60
_MAX_LOOKS = 32  # beyond more than a year, no end is told
_LOOK_DAYS = 16  # a week of a batch, from a week's first window on, and the days around it
_WINDOW = re.compile(r"(?:([A-Za-z]{3})(?:-([A-Za-z]{3}))? )?(\d{2}):(\d{2})-(\d{2}):(\d{2})", re.ASCII)
_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,2}", re.ASCII)

Interval = tuple[float, float]  # Unix seconds, half open


@dataclass(frozen=True, slots=True)
class DailyWindow:
    """One window: on these days (Monday is 0), from a minute of that day to one of it or of the next."""

    days: frozenset[int]
    start_minute: int
    end_minute: int  # greater than `start_minute`, at most 24 hours later


@dataclass(frozen=True, slots=True)
class Hours:
    """All windows, in one time zone."""

    windows: tuple[DailyWindow, ...]
    zone: str

    def is_open(self, now: float) -> bool:
        """Return whether work may start at this Unix time."""
        return any(start <= now < end for start, end in self.intervals(now))

    def open_seconds(self, start_s: float, end_s: float) -> float:
        """Return for how much of the time between two Unix times it is open."""
        spans = (min(end, end_s) - max(start, start_s) for start, end in self.intervals(start_s))
        return sum(span for span in spans if span > 0.0)

    def after(self, start_s: float, open_s: float) -> float:
        """Return the Unix time at which it has been open so long since `start_s`; with 0: the next open moment."""
        at_s, left_s = start_s, open_s
        for _ in range(_MAX_LOOKS):
            for start, end in self.intervals(at_s):
                begin = max(start, at_s)
                if begin < end and (left_s < end - begin or (left_s == end - begin and left_s > 0.0)):
                    return begin + left_s
                left_s -= max(0.0, end - begin)
            intervals = self.intervals(at_s)
            last = _moment(self.zone, local_date(self.zone, at_s).toordinal() - 1 + _LOOK_DAYS, 0)
            at_s = max(last, intervals[-1][1]) if intervals else last
        return at_s

    def intervals(self, now: float) -> tuple[Interval, ...]:
        """Return when it is open from the day before `now` on, for two weeks: in order, none touches another."""
        return _intervals(self, local_date(self.zone, now).toordinal() - 1)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The times at which a batch may start lines, and a simulated class of documents requests."""

    not_before_s: float = 0.0  # Unix seconds
    hours: Hours | None = None  # None: at any hour

    def is_open(self, now: float) -> bool:
        """Return whether work may start at this Unix time."""
        return now >= self.not_before_s and (self.hours is None or self.hours.is_open(now))

    def open_seconds(self, start_s: float, end_s: float) -> float:
        """Return for how much of the time between two Unix times work may start; at most two weeks."""
        start_s = max(start_s, self.not_before_s)
        if self.hours is None:
            return max(0.0, end_s - start_s)
        return self.hours.open_seconds(start_s, end_s)

    def after(self, start_s: float, open_s: float) -> float:
        """Return when it has been open for this long since `start_s`; with 0: when work may start next."""
        start_s = max(start_s, self.not_before_s)
        return start_s + open_s if self.hours is None else self.hours.after(start_s, open_s)


ALWAYS = Schedule()


def parse_hours(text: str) -> Hours:
    """Parse hours. Raises InvalidRequest that names what is wrong."""
    if len(text) > MAX_HOURS_LEN:
        raise _refused(f"hours may have {MAX_HOURS_LEN} characters.")
    listed, _, zone = text.strip().rpartition(" ")
    if not listed or ":" in zone:
        raise _refused("hours must end with a time zone, as in '22:00-06:00 Europe/Berlin'.")
    if not is_zone(zone):
        raise _refused(f"hours name an unknown time zone: {zone[:64]!r}. Known are names as Europe/Berlin, and UTC.")
    parts = [part.strip() for part in listed.split(",")]
    if len(parts) > _MAX_WINDOWS:
        raise _refused(f"hours may have {_MAX_WINDOWS} windows.")
    return Hours(tuple(_window(part) for part in parts), zone)


def is_zone(name: str) -> bool:
    """Return whether the time zone is known. Only a plain name is looked up, never a path."""
    if _ZONE.fullmatch(name) is None:
        return False
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def parse_moment(text: str, zone: str) -> float:
    """Parse a time such as 2026-11-25T22:00, in this zone unless the text has an offset. Raises InvalidRequest."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _refused(f"{text[:64]!r} is not a time, such as 2026-11-25T22:00.") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=zoneinfo.ZoneInfo(zone))).timestamp()


def local_date(zone: str, now: float) -> date:
    return datetime.fromtimestamp(now, zoneinfo.ZoneInfo(zone)).date()


def _window(text: str) -> DailyWindow:
    match = _WINDOW.fullmatch(text)
    if match is None:
        raise _refused(f"hours have a window that cannot be read: {text[:64]!r}. One is as 'Mon-Fri 22:00-06:00'.")
    start, end = _minute(match[3], match[4]), _minute(match[5], match[6])
    if start in (_DAY_MINUTES, end):
        raise _refused(f"hours have a window without any time: {text[:64]!r}. A whole day is 00:00-24:00.")
    return DailyWindow(_days(match[1], match[2]), start, end if end > start else end + _DAY_MINUTES)


def _minute(hour: str, minute: str) -> int:
    value = int(hour) * 60 + int(minute)
    if int(minute) > 59 or value > _DAY_MINUTES:
        raise _refused(f"hours have a time that no clock shows: {hour}:{minute}.")
    return value


def _days(first: str | None, last: str | None) -> frozenset[int]:
    if first is None:
        return frozenset(range(7))
    start = _day(first)
    end = _day(last) if last is not None else start
    return frozenset((start + step) % 7 for step in range((end - start) % 7 + 1))


def _day(name: str) -> int:
    if name.lower() not in _DAYS:
        raise _refused(f"hours name an unknown day: {name!r}. Days are Mon, Tue, Wed, Thu, Fri, Sat, Sun.")
    return _DAYS.index(name.lower())


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="hours", code="invalid_value")


@lru_cache(maxsize=1024)
def _intervals(hours: Hours, first_day: int) -> tuple[Interval, ...]:
    joined: list[Interval] = []
    for start, end in sorted(_all_intervals(hours, first_day)):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return tuple(joined)


def _all_intervals(hours: Hours, first_day: int) -> Iterator[Interval]:
    for day in range(first_day, first_day + _LOOK_DAYS):
        for window in hours.windows:
            if date.fromordinal(day).weekday() in window.days:
                start = _moment(hours.zone, day, window.start_minute)
                end = _moment(hours.zone, day, window.end_minute)
                if start < end:  # one within the hour that a change of clocks leaves out is empty
                    yield start, end


def _moment(zone: str, day: int, minute: int) -> float:
    day, minute = day + minute // _DAY_MINUTES, minute % _DAY_MINUTES
    shown = datetime.combine(date.fromordinal(day), time(minute // 60, minute % 60))
    there = zoneinfo.ZoneInfo(zone)
    before, after = (shown.replace(tzinfo=there, fold=fold).timestamp() for fold in (0, 1))
    if after >= before:  # clocks show it once, or twice
        return before
    skipped = range(int(after), int(before) + 1)
    return float(skipped[bisect_left(skipped, True, key=lambda second: _shown(there, second) >= shown)])


def _shown(there: zoneinfo.ZoneInfo, unix_s: float) -> datetime:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=unix_s)
    return moment.astimezone(there).replace(tzinfo=None)


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
    """Return the positions with the batches of each owner by priority, smaller first, in the places that it has. Owners
    keep their places among each other. Example: A's batches a (priority 0) and b (-5), and B's c, in the order a, c, b:
    b, c, a."""
    by_owner: dict[str, list[Turn]] = {}
    for turn in order:
        by_owner.setdefault(turn.owner, []).append(turn)
    sorted_own = {owner: iter(sorted(turns, key=lambda turn: turn.priority)) for owner, turns in by_owner.items()}
    return [next(sorted_own[turn.owner]).position for turn in order]


@lru_cache(maxsize=1024)
def _hours(text: str) -> Hours:
    return parse_hours(text)
