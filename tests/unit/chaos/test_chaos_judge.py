"""The judge of chaos: what it calls survived, and what it does not let pass."""

from typing import Any

from benchmarks.chaos.__main__ import summary_of
from benchmarks.chaos.judge import Ending, Outcome, ending_of, problems, promised_endings
from benchmarks.chaos.schedules import ChaosFault, ChaosSchedule, Hit, Phase, Target
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
