"""Deadlines of tokens, against a schedule that is written out one deadline at a time; and completions by arrivals."""

import random

import pytest

from alignedserve.core.metrics import completed_of_arrived, token_deadlines
from alignedserve.core.request import Slo
from tests.support.marks import each


def written_out(slo: Slo, times_s: list[float], ended_s: float | None) -> tuple[int, int]:
    """Count (due, met) of a request that arrived at 0 by a list of every deadline, drawn up anew after a late token."""
    met = missed = 0
    due_s = slo.ttft_s
    waiting = [*times_s, *([] if ended_s is None else [ended_s])]
    for place, time_s in enumerate(waiting):
        is_end = place == len(times_s)
        if due_s is not None:
            if time_s <= due_s and not is_end:
                met += 1
            elif time_s <= due_s:
                missed += 1  # the request ended before the token was due: it will not come
            else:
                passed = [due_s]
                while slo.tpot_s is not None and passed[-1] + slo.tpot_s <= time_s:
                    passed.append(passed[-1] + slo.tpot_s)
                missed += len(passed)
                due_s = time_s
        if slo.tpot_s is None:
            break
        due_s = (time_s if due_s is None else due_s) + slo.tpot_s
    return met + missed, met


@each("seed", range(200))
def test_deadlines_are_those_of_a_schedule_that_is_written_out(seed: int) -> None:
    drawn = random.Random(seed)

    def eighths(most: int) -> float:
        return drawn.randrange(1, most) / 8  # exact in binary: no rounding at a deadline

    slo = Slo(
        ttft_s=eighths(20) if drawn.random() < 0.8 else None, tpot_s=eighths(10) if drawn.random() < 0.8 else None
    )
    times_s = [0.0]
    for _ in range(drawn.randrange(12)):
        times_s.append(times_s[-1] + drawn.choice((0.0, eighths(8), eighths(100))))
    ended_s = times_s[-1] + eighths(50) if drawn.random() < 0.4 else None
    assert token_deadlines(slo, 0.0, times_s[1:], ended_s=ended_s) == written_out(slo, times_s[1:], ended_s)


def test_time_gained_is_carried_over_and_a_stall_misses_every_deadline_that_passes_in_it() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    early = [0.1, *(0.1 + 0.01 * number for number in range(1, 11))]  # the eleventh is due at 2.0
    assert token_deadlines(slo, 0.0, [*early, 2.05]) == (12, 12)
    assert token_deadlines(slo, 0.0, [1.0, 1.1, 1.55, 1.65]) == (7, 3)  # due at 1.2, 1.3, 1.4, 1.5; then from 1.55 on


def test_a_request_that_ends_without_its_tokens_misses_at_least_one() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.5)
    assert token_deadlines(slo, 0.0, [], ended_s=0.0) == (1, 0)
    assert token_deadlines(slo, 0.0, [], ended_s=2.1) == (3, 0)
    assert token_deadlines(slo, 0.0, [], ended_s=0.9, is_cut=True) == (0, 0)  # what comes after was not simulated
    assert token_deadlines(slo, 0.0, [], ended_s=2.1, is_cut=True) == (3, 0)
    assert token_deadlines(Slo(), 0.0, [1.0, 2.0], ended_s=9.0) == (0, 0)
    assert token_deadlines(Slo(ttft_s=1.0), 0.0, [0.5], ended_s=9.0) == (1, 1)  # no objective for those after it


def test_several_tokens_at_one_recorded_time_have_as_many_steps() -> None:
    assert token_deadlines(Slo(tpot_s=0.125), 0.0, [0.0, 0.25, 0.5], pace=2.0) == (2, 2)
    assert token_deadlines(Slo(tpot_s=0.125), 0.0, [0.0, 0.25, 0.5]) == (4, 0)


def test_completions_by_arrivals_see_a_queue_that_grows() -> None:
    arrivals_s = [float(number) for number in range(101)]
    assert completed_of_arrived(arrivals_s, [time_s + 10 for time_s in arrivals_s]) == 1.0
    assert completed_of_arrived(arrivals_s, [2 * time_s for time_s in arrivals_s]) == 0.5
    burst = completed_of_arrived([0.01 * number for number in range(300)], [0.3 * number for number in range(300)])
    assert burst == pytest.approx(8 / 240, abs=0.001)  # all are sent in 3 s; nothing is a rate of that
    assert completed_of_arrived([], []) is None
    assert completed_of_arrived([1.0], [2.0]) is None
