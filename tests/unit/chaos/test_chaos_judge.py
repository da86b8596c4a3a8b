"""The judge of chaos: what it calls survived, and what it does not let pass."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.chaos.__main__ import summary_of
from benchmarks.chaos.judge import Ending, Outcome, ending_of, problems, promised_endings
from benchmarks.chaos.schedules import (
    ChaosFault,
    ChaosSchedule,
    Hit,
    Phase,
    Target,
    all_pairs,
    covering,
    make_schedule,
    pairs_of,
    shrink,
)
from tests.support.marks import each


def scheduled(target: Target, hit: Hit = Hit.KILL, phase: Phase = Phase.DECODE) -> ChaosSchedule:
    return ChaosSchedule(0, (ChaosFault(target, hit, phase),))


@each(
    ("status", "text", "is_done", "error", "ending"),
    [
        (200, "abc", True, None, Ending.EXACT),
        (200, "ab", True, None, Ending.WRONG),  # one token lost, and nobody says so
        (200, "abcc", True, None, Ending.WRONG),  # one doubled
        (200, "abc", False, None, Ending.WRONG),  # it ends without its end
        (200, "ab", False, '{"error": {}}', Ending.ERROR),
        (200, "xb", False, '{"error": {}}', Ending.WRONG),
        (200, "ab", False, "ReadError()", Ending.BROKEN),
        (0, "", False, "ConnectError()", Ending.BROKEN),
        (503, "", False, "{}", Ending.REFUSED),
        (500, "", False, "{}", Ending.WRONG),
    ],
)
def test_how_a_stream_ended(status: int, text: str, is_done: bool, error: str | None, ending: Ending) -> None:
    assert ending_of(status, text, "abc", is_done=is_done, error=error) is ending


def test_a_lost_worker_is_never_seen_by_a_client() -> None:
    for target in (Target.DECODE, Target.PREFILL, Target.POOL, Target.DRIVER):
        assert promised_endings(scheduled(target).faults) == {Ending.EXACT}


def test_a_stream_ends_with_its_gateway_and_a_stopped_one_goes_on() -> None:
    assert Ending.BROKEN in promised_endings(scheduled(Target.GATEWAY).faults)
    assert Ending.BROKEN not in promised_endings(scheduled(Target.GATEWAY, Hit.STOP).faults)


@each(
    "change",
    [
        {"endings": {"wrong": 1}},
        {"endings": {"hung": 1}},
        {"endings": {"connection lost": 1}},
        {"lines_lost": 1},
        {"lines_doubled": 1},
        {"lines_wrong": 1},
        {"batch_status": "failed"},
        {"recovered_s": None},
        {"recovered_s": 60.0},
        {"held": {"alignedserve_pool_blocks_used": 3.0}},
        {"arenas_left": 1},
    ],
)
def test_what_was_not_promised_is_a_problem(change: dict[str, Any]) -> None:
    assert problems(scheduled(Target.DECODE), Outcome(endings={"exact": 8})) == []
    assert len(problems(scheduled(Target.DECODE), Outcome(**change))) == 1


def test_records_are_summed_up_by_what_was_hit() -> None:
    fault = {
        "target": "pool",
        "hit": "killed",
        "phase": "decode",
        "was_there": True,
        "phases_hit": ["decode", "prefill"],
    }
    survived = {
        "is_survived": True,
        "faults": [fault],
        "outcome": Outcome(endings={"exact": 8}).as_json(),
        "problems": [],
    }
    failed = {**survived, "is_survived": False, "faults": [fault, {**fault, "was_there": False}], "logs": "…"}
    figures = summary_of([survived, failed])
    assert (figures["num_schedules"], figures["num_not_survived"], figures["num_faults"]) == (2, 1, 2)
    assert figures["num_faults_impossible_here"] == 1
    assert figures["by_fault"] == {
        "pool: killed": {"schedules": 2, "survived": 1, "endings_alone": {"exact": 8}},
    }
    assert figures["phases_hit"] == {"decode": 2, "prefill": 2}
    assert "logs" not in figures["not_survived"][0]


# Schedules of faults: the same for the same seed, every pair covered, and shrunk to what is needed.

KILL = ChaosFault(Target.ROUTER, Hit.KILL, Phase.DECODE, 0.4, 0.0)
STOP = ChaosFault(Target.DECODE, Hit.STOP, Phase.PREFILL, 0.3, 0.7)
CUT = ChaosFault(Target.POOL, Hit.CUT, Phase.HANDOFF, 0.2, 0.6)
CALM = [ChaosFault(Target.GATEWAY, Hit.SLOW, Phase.IDLE, 0.1, 0.5 + number / 100) for number in range(5)]


def failing_with(*needed: ChaosFault) -> Callable[[ChaosSchedule], bool]:
    """Return a system that fails under these faults together, however long they take."""
    wanted = {(fault.target, fault.hit) for fault in needed}
    return lambda schedule: wanted <= {(fault.target, fault.hit) for fault in schedule.faults}


def test_a_seed_has_one_schedule() -> None:
    assert make_schedule(17) == make_schedule(17)
    assert len({make_schedule(seed).faults for seed in range(100)}) == 100


def test_two_thousand_seeds_have_every_pair_many_times() -> None:
    seen = [pair for seed in range(2000) for fault in make_schedule(seed).faults for pair in pairs_of(fault)]
    assert min(seen.count(pair) for pair in all_pairs()) >= 3


def test_forty_schedules_cover_every_pair() -> None:
    schedules = covering(40)
    assert len(schedules) == 40
    assert {pair for one in schedules for fault in one.faults for pair in pairs_of(fault)} == all_pairs()
    assert max(len(one.faults) for one in schedules) <= 3
    assert covering(40) == schedules


def test_too_few_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit into 3"):
        covering(3)


@pytest.mark.parametrize("needed", [(KILL,), (STOP, CUT), (KILL, STOP, CUT)])
def test_a_failing_schedule_shrinks_to_the_faults_that_it_takes(needed: tuple[ChaosFault, ...]) -> None:
    schedule = ChaosSchedule(1, (CALM[0], KILL, CALM[1], CALM[2], STOP, CALM[3], CUT, CALM[4]))
    shortest = shrink(schedule, failing_with(*needed))
    assert [(one.target, one.hit) for one in shortest.faults] == [(one.target, one.hit) for one in needed]
    assert all(fault.pause_s == 0.0 for fault in shortest.faults)


def test_a_duration_that_matters_is_kept() -> None:
    def fails(schedule: ChaosSchedule) -> bool:
        return any(fault.hit is Hit.STOP and fault.duration_s >= 0.5 for fault in schedule.faults)

    assert shrink(ChaosSchedule(1, (KILL, STOP)), fails).faults == (
        ChaosFault(STOP.target, STOP.hit, STOP.phase, 0.0, STOP.duration_s),
    )
