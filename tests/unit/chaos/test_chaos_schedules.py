"""Schedules of faults: the same for the same seed, every pair covered, and shrunk to what is needed."""

from collections.abc import Callable

import pytest

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
