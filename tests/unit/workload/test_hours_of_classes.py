"""Documents of a workload start in their hours, as lines of a batch do, also where clocks are changed."""

from itertools import pairwise

import pytest

from alignedserve.batches.hours import parse_hours, parse_moment
from alignedserve.core.errors import ConfigError
from lab.sim.simulation import BEGIN_S, Simulation
from lab.workload.build import build_workload
from lab.workload.catalogue import Library
from lab.workload.grammar import parse_classes
from lab.workload.requests import ClosedLoopRun, TimeWindow, Workload, window_of
from tests.harnesses.simulation import colocated
from tests.support.marks import each

NIGHT = "22:00-06:00 Europe/Berlin"
HOUR_S = 3600.0
LOOP = "be: prompt=20, output=4, outstanding=2"


def build(line: str, duration_s: float = 40 * HOUR_S) -> Workload:
    return build_workload(line, seed=1, library=Library(), duration_s=duration_s)


def at_night(begins: str, line: str = LOOP) -> str:
    return f"{line}, hours={NIGHT}, begins={begins}"


@each(
    ("begins", "night_hours"),
    [("2026-11-25T12:00", 8.0), ("2026-10-24T12:00", 9.0), ("2026-03-28T12:00", 7.0)],
    ids=["an ordinary night", "of clocks set back", "of clocks set forward"],
)
def test_a_loop_starts_in_its_hours_alone(begins: str, night_hours: float) -> None:
    run = ClosedLoopRun(build(at_night(begins)))
    evening_s, morning_s = 10 * HOUR_S, (10 + night_hours) * HOUR_S
    next_evening_s = evening_s + (16.0 + night_hours) * HOUR_S

    def after(finished_s: float) -> list[float]:
        return [request.arrival_s for request in run.next_after("be", finished_s)]

    assert [request.arrival_s for request in run.first()] == [evening_s, evening_s]
    assert after(evening_s + 1.5) == [evening_s + 1.5]
    assert after(morning_s - 0.5) == [morning_s - 0.5]
    assert after(morning_s) == [next_evening_s]
    assert after(next_evening_s - 0.5) == [next_evening_s]
    assert after(40 * HOUR_S) == []  # the run is over


@each("begins", ["2026-11-25T12:00", "2026-10-24T12:00", "2026-03-28T12:00", "2026-11-25T12:00-05:00"])
def test_what_comes_by_day_starts_in_the_evening(begins: str) -> None:
    requests = build(at_night(begins, "be: prompt=20, output=4, rate=0.01")).requests
    anyhow = build("be: prompt=20, output=4, rate=0.01").requests
    hours, begins_s = parse_hours(NIGHT), parse_moment(begins, "Europe/Berlin")
    assert all(hours.is_open(begins_s + request.arrival_s) for request in requests)
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(requests))
    assert 0 < len(requests) <= len(anyhow)  # those whose hours begin after the end are left out
    by_night = [one.arrival_s for one in anyhow if hours.is_open(begins_s + one.arrival_s)]
    assert set(by_night) <= {request.arrival_s for request in requests}


def test_nothing_starts_before_its_time() -> None:
    run = ClosedLoopRun(build(f"{LOOP}, not_before=100"))
    assert [request.arrival_s for request in run.first()] == [100.0, 100.0]
    assert [request.arrival_s for request in run.next_after("be", 130.25)] == [130.25]


def test_a_window_of_a_run_keeps_the_hours() -> None:
    part = window_of(build(at_night("2026-11-25T12:00")), TimeWindow(8 * HOUR_S, 30 * HOUR_S))
    assert [request.arrival_s for request in ClosedLoopRun(part).first()] == [2 * HOUR_S] * 2


def test_a_simulated_batch_waits_for_the_night() -> None:
    line = f"rt: prompt=20, output=4, rate=1; {at_night('2026-11-25T21:58:00')}"
    simulation = Simulation(colocated(1), build(line, duration_s=180.0))
    result = simulation.run()
    started = [one.arrival_s - BEGIN_S for one in simulation.records() if one.class_name == "be"]
    assert min(started) == 120.0
    assert len(started) > 100
    assert result.classes["rt"].num_by_ending["completed"] == result.classes["rt"].num_sent > 100


@each(
    ("settings", "complaint"),
    [
        ("hours=22:00-06:00 UTC", "begins="),
        ("begins=2026-11-25T18:00", "hours="),
        ("hours=22:00-06:00, begins=2026-11-25T18:00", "time zone"),
        ("hours=22-06 UTC, begins=2026-11-25T18:00", "'22-06'"),
        ("hours=22:00-06:00 UTC, begins=tonight", "'tonight' is not a time"),
        ("hours=22:00-06:00 UTC, begins=2026-11-25T18:00, class=rt", "real-time"),
        ("not_before=10, class=rt", "real-time"),
        ("not_before=-1", "not be negative"),
    ],
)
def test_hours_that_cannot_be_are_refused_by_name(settings: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_classes(f"{LOOP}, {settings}")


def test_several_windows_stand_in_parentheses() -> None:
    hours = "Mon-Fri 22:00-06:00, Sat-Sun 00:00-24:00 Europe/Berlin"
    (spec,) = parse_classes(f"{LOOP}, hours=({hours}), begins=2026-11-25T18:00")
    assert spec.hours == parse_hours(hours)
