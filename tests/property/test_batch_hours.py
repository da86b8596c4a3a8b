"""Hours of batches against a clock that is read minute by minute, and under clocks that jump."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.batches.hours import Hours, may_start, open_time_left, parse_hours, reason_to_wait
from alignedserve.batches.logic import AllLinesRecorded, PauseRequested, ResumeRequested, Validated, advance
from alignedserve.batches.records import BatchRecord, BatchStatus
from tests.support.batch_samples import batch_record

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe", "Pacific/Apia")
# Around changes of clocks in several zones, and one ordinary week.
STARTS = tuple(
    datetime(*day, tzinfo=UTC).timestamp()
    for day in ((2026, 3, 28), (2026, 10, 24), (2026, 3, 7), (2026, 10, 31), (2026, 10, 3), (2026, 4, 4), (2026, 6, 1))
)


@st.composite
def listed_hours(draw: st.DrawFn) -> str:
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, 24 * 60 - 1))
        end = (start + draw(st.integers(1, 24 * 60))) % (24 * 60 + 1)
        days = draw(st.sampled_from(["", "Mon-Fri ", "Sat-Mon ", *(f"{day} " for day in DAYS)]))
        parts.append(f"{days}{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}")
    return f"{', '.join(parts)} {draw(st.sampled_from(ZONES))}"


def shows_an_open_hour(hours: Hours, unix_s: float) -> bool:
    """Return what somebody says who looks at a clock and a calendar; changed clocks are not thought of."""
    shown = datetime.fromtimestamp(unix_s, ZoneInfo(hours.zone))
    minute = shown.hour * 60 + shown.minute
    return any(
        (window.start_minute <= minute + ago * 1440 < window.end_minute)
        and (shown.date() - timedelta(days=ago)).weekday() in window.days
        for window in hours.windows
        for ago in (0, 1)
    )


def clocks_are_changed_near(zone: str, unix_s: float) -> bool:
    offsets = {datetime.fromtimestamp(unix_s + away_s, ZoneInfo(zone)).utcoffset() for away_s in (-7200.0, 0.0, 7200.0)}
    return len(offsets) > 1


@settings(max_examples=60)
@given(listed_hours(), st.sampled_from(STARTS), st.floats(0.0, 3 * 86_400.0))
def test_it_is_open_when_a_clock_on_the_wall_says_so(text: str, start_s: float, later_s: float) -> None:
    hours, now = parse_hours(text), start_s + later_s
    if not clocks_are_changed_near(hours.zone, now):
        assert hours.is_open(now) == shows_an_open_hour(hours, now)


@settings(max_examples=60)
@given(listed_hours(), st.sampled_from(STARTS), st.floats(0.0, 86_400.0), st.floats(1.0, 6 * 3600.0))
def test_what_is_open_until_the_end_of_work_is_as_long_as_the_work(
    text: str, start_s: float, later_s: float, work_s: float
) -> None:
    hours, now = parse_hours(text), start_s + later_s
    begins_s, ends_s = hours.after(now, 0.0), hours.after(now, work_s)
    assert now <= begins_s < ends_s
    assert hours.is_open(begins_s)
    if ends_s - now < 12 * 86_400.0:  # as far as open time is counted
        assert abs(hours.open_seconds(now, ends_s) - work_s) < 0.01
        assert hours.open_seconds(now, begins_s) < 0.001


CLOCKS = st.lists(
    st.tuples(
        st.sampled_from(["pass", "jump", "pause", "resume"]),
        st.floats(0.0, 1800.0),
        st.sampled_from([-3600.0, 3600.0]),
    ),
    max_size=200,
)


@settings(max_examples=60)
@given(listed_hours(), st.sampled_from(STARTS), CLOCKS)
def test_no_line_starts_while_the_clock_shows_another_hour_and_none_is_lost(
    text: str, start_s: float, history: list[tuple[str, float, float]]
) -> None:
    """Play a batch of five lines; each start is seen with the clock that it was decided by."""
    record = _running(text, start_s)
    now, left, running, done = start_s, list(range(5)), list[int](), list[int]()
    for kind, passes_s, jumps_s in history:
        now += passes_s
        now += jumps_s if kind == "jump" else 0.0
        if kind in ("pause", "resume"):
            record = advance(record, PauseRequested() if kind == "pause" else ResumeRequested(), now)
        done += running  # a line that runs may end at any hour
        running = []
        if left and may_start(record, now):
            assert parse_hours(text).is_open(now)
            assert record.paused_s is None
            assert now < record.expires_s
            assert reason_to_wait(record, now) is None
            running.append(left.pop())
        elif left and now < record.expires_s:
            assert reason_to_wait(record, now) is not None
        assert open_time_left(record, now) <= max(0.0, record.expires_s - now) + 0.001
    assert sorted(left + running + done) == list(range(5))


def _running(hours: str, created_s: float) -> BatchRecord:
    record = msgspec.structs.replace(
        batch_record(), created_s=created_s, expires_s=created_s + 7 * 86_400.0, hours=hours
    )
    return advance(record, Validated(5, "pocket"), created_s)


def test_a_paused_batch_ends_like_any_other() -> None:
    paused = advance(_running("22:00-06:00 UTC", 0.0), PauseRequested(), 1.0)
    assert advance(paused, PauseRequested(), 2.0) is paused
    ended = advance(paused, AllLinesRecorded(), 3.0)
    assert ended.status is BatchStatus.COMPLETED
    assert advance(ended, ResumeRequested(), 4.0) is ended
