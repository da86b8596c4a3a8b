"""Turns of an encoder between iterations: as long as promises allow, and known to the policy."""

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams, Slo
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.picture_turns import LONGEST_TURN_S, ExpectedTurns, TurnLengths


class _Costs:
    def iteration_s(self, work: IterationWork) -> float:
        return 0.05

    def swap_s(self, num_tokens: float) -> float:
        return num_tokens


def chat(name: str, tpot_s: float | None) -> Request:
    return Request(RequestId(name), (1,), SamplingParams(max_tokens=9), "", 0.0, slo=Slo(tpot_s=tpot_s))


def test_a_turn_ends_in_time_for_the_tightest_promise() -> None:
    lengths = TurnLengths()
    for _ in range(50):
        lengths.ran(0.1)
    assert lengths.turn_s == pytest.approx(0.1)  # nobody was promised anything
    lengths.enter(chat("a", 0.2))
    lengths.enter(chat("none", None))
    assert lengths.turn_s == pytest.approx(0.08, abs=1e-4)
    lengths.enter(chat("b", 0.12))
    assert lengths.turn_s == pytest.approx(0.008, abs=1e-4)
    lengths.enter(chat("c", 0.05))
    assert lengths.turn_s == 0.0  # a step
    for name in "cb":
        lengths.leave(RequestId(name))
    assert lengths.turn_s == pytest.approx(0.08, abs=1e-4)
    assert TurnLengths().turn_s == LONGEST_TURN_S


def test_a_turn_is_told_once() -> None:
    lengths = TurnLengths()
    lengths.took(0.3)
    lengths.took(0.02)
    assert [lengths.before_iteration(), lengths.before_iteration()] == [0.02, 0.0]


def test_the_policy_reckons_with_turns_while_there_are_some() -> None:
    turns, costs = ExpectedTurns(), _Costs()
    turns.note(0.0)
    assert turns.beside(costs) is costs
    for _ in range(30):
        turns.note(0.02)
    assert turns.beside(costs).iteration_s(IterationWork()) == pytest.approx(0.07, abs=1e-4)
    assert turns.beside(costs).swap_s(3) == 3
    for _ in range(30):
        turns.note(0.0)
    assert turns.beside(costs) is costs
