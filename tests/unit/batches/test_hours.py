"""When lines of a batch may start: windows of clock time, days of the week, changed clocks, pauses, priorities."""

from collections.abc import Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from typing_extensions import override

from alignedserve.batches.hours import Schedule, Turn, by_priority, check_window, parse_hours, window_text
from alignedserve.core.errors import InvalidRequest

NIGHT = "22:00-06:00 Europe/Berlin"


def at(text: str, zone: str = "Europe/Berlin") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def hours_between(hours: str, start: str, end: str) -> float:
    return parse_hours(hours).open_seconds(at(start), at(end)) / 3600.0


def test_a_night_begins_in_the_evening_and_ends_in_the_morning() -> None:
    night = parse_hours(NIGHT)
    shut_or_open = {"21:59:59": False, "22:00:00": True, "23:59:59": True}
    assert {clock: night.is_open(at(f"2026-11-25T{clock}")) for clock in shut_or_open} == shut_or_open
    assert night.is_open(at("2026-11-26T05:59:59"))
    assert not night.is_open(at("2026-11-26T06:00:00"))


def test_a_night_has_as_many_hours_as_pass_when_clocks_are_changed() -> None:
    assert hours_between(NIGHT, "2026-03-28T12:00", "2026-03-29T12:00") == 7.0
    assert hours_between(NIGHT, "2026-10-24T12:00", "2026-10-25T12:00") == 9.0
    assert hours_between(NIGHT, "2026-11-25T12:00", "2026-11-26T12:00") == 8.0


def test_a_time_that_clocks_leave_out_is_the_moment_they_are_changed() -> None:
    skipped = parse_hours("02:30-04:00 Europe/Berlin")
    assert skipped.after(at("2026-03-29T00:00"), 0.0) == at("2026-03-29T03:00")
    assert hours_between("02:10-02:50 Europe/Berlin", "2026-03-29T00:00", "2026-03-29T12:00") == 0.0


def test_a_time_that_clocks_show_twice_is_the_first_one() -> None:
    twice = parse_hours("02:30-04:00 Europe/Berlin")
    assert twice.after(at("2026-10-25T00:00"), 0.0) == at("2026-10-25T02:30")
    assert hours_between("02:30-04:00 Europe/Berlin", "2026-10-25T00:00", "2026-10-25T12:00") == 2.5


def test_a_window_belongs_to_the_day_on_which_it_begins() -> None:
    week = parse_hours("Mon-Fri 22:00-06:00, Sun 00:00-24:00 Europe/Berlin")
    assert week.is_open(at("2026-11-28T05:00"))  # of Friday's night
    assert not week.is_open(at("2026-11-28T23:00"))  # a Saturday
    assert week.is_open(at("2026-11-29T23:59"))
    assert not week.is_open(at("2026-11-30T00:00"))  # a Monday: no night begins on Sunday


def test_days_may_go_round_the_end_of_the_week() -> None:
    assert parse_hours("fri-Mon 08:00-09:00 UTC").windows[0].days == {4, 5, 6, 0}


def test_work_ends_when_it_has_had_its_time() -> None:
    night = parse_hours(NIGHT)
    assert night.after(at("2026-11-25T12:00"), 3600.0) == at("2026-11-25T23:00")
    assert night.after(at("2026-11-25T12:00"), 8 * 3600.0) == at("2026-11-26T06:00")
    assert night.after(at("2026-11-25T12:00"), 9 * 3600.0) == at("2026-11-26T23:00")
    assert parse_hours("00:00-24:00 UTC").after(0.0, 30 * 86_400.0) == 30 * 86_400.0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("22:00-06:00", "time zone"),
        ("22:00-06:00 Mars/Olympus", "Mars/Olympus"),
        ("22:00-06:00 ../../etc/passwd", "etc/passwd"),
        ("22-06 UTC", "'22-06'"),
        ("Foo 22:00-06:00 UTC", "'Foo'"),
        ("25:00-06:00 UTC", "25:00"),
        ("22:61-06:00 UTC", "22:61"),
        ("10:00-10:00 UTC", "without any time"),
        ("", "time zone"),
        (", ".join(["22:00-06:00"] * 17) + " UTC", "16 windows"),
        ("22:00-06:00 UTC" + " " * 300, "256 characters"),
    ],
)
def test_hours_that_cannot_be_read_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match="hours") as refused:
        parse_hours(text)
    assert named in str(refused.value)
    assert refused.value.param == "hours"


def test_a_window_that_ends_before_its_hours_names_the_shortest_that_will_do() -> None:
    night, noon = Schedule(hours=parse_hours(NIGHT)), at("2026-11-25T12:00")
    check_window(night, noon, noon + 11 * 3600.0)
    with pytest.raises(InvalidRequest, match="The shortest is 11h"):
        check_window(night, noon, noon + 2 * 3600.0)
    with pytest.raises(InvalidRequest, match="The shortest is 31m"):
        check_window(Schedule(noon + 1800.0), noon, noon + 60.0)


def test_windows_are_told_as_clients_write_them() -> None:
    assert [window_text(seconds) for seconds in (1.0, 61.0, 7200.0, 7201.0)] == ["1m", "2m", "120m", "3h"]


def test_priorities_order_one_owners_batches_in_the_places_that_it_has() -> None:
    order = [Turn(0, "A", 0), Turn(1, "B", 9), Turn(2, "A", -5), Turn(3, "B", 9), Turn(4, "A", -5)]
    assert by_priority(order) == [2, 1, 4, 3, 0]
    assert by_priority([]) == []


def test_the_batches_of_many_owners_are_gone_through_once_for_all_of_them() -> None:
    """Once for each owner took 10 s for 10 000 of them, on the loop that answers all gateways."""
    num_passes = 0

    class Counted(list[Turn]):
        @override
        def __iter__(self) -> Iterator[Turn]:
            nonlocal num_passes
            num_passes += 1
            return super().__iter__()

    assert by_priority(Counted(Turn(place, f"owner-{place}", 0) for place in range(100))) == list(range(100))
    assert num_passes < 10
