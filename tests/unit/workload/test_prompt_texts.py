"""Texts that prompts share: conversations, instructions, traces."""

import pytest

from alignedserve.core.errors import ConfigError
from lab.loadgen.load_plan import plan_synthetic
from lab.workload.build import build_workload
from lab.workload.catalogue import Library
from lab.workload.distributions import LengthLimits
from lab.workload.requests import LEAD_IN, ClosedLoopRun, TextRun, TimeWindow, Workload, turns_of, window_of
from tests.support.marks import each

LIBRARY = Library()


def build(specification: str, num_requests: int | None = 4, duration_s: float | None = None) -> Workload:
    return build_workload(specification, seed=3, library=LIBRARY, num_requests=num_requests, duration_s=duration_s)


def test_a_turn_repeats_all_that_was_said_before() -> None:
    workload = build("chat: prompt=20, output=50, rate=1, turns=3, think=2, instruction=1000")
    assert len(workload.requests) == 4  # conversations
    first, second, third = turns_of(workload.requests[0])
    assert (first.prompt_len, second.prompt_len, third.prompt_len) == (1020, 1020 + 49 + 20, 1089 + 49 + 20)
    assert first.runs[0] == TextRun("chat/instruction 0", 1000)
    assert second.runs[:2] == first.runs
    assert third.runs[:4] == second.runs
    assert second.runs[2] == TextRun(str(first.answer), 49)
    assert (second.arrival_s, third.arrival_s) == (2.0, 2.0)
    other = workload.requests[1]
    assert other.runs[0] == first.runs[0]
    assert {run.text for run in other.runs[1:]}.isdisjoint(run.text for run in third.runs[1:])


def test_each_turn_draws_its_own_lengths() -> None:
    workload = build("prompt=uniform(1,999), output=uniform(1,999), rate=1, turns=2", 50)
    said = [(turn.runs[-1].num_tokens, turn.output_len) for one in workload.requests for turn in turns_of(one)]
    assert len(set(said)) > 90


def test_turns_follow_answers_and_conversations_one_another() -> None:
    workload = build("chat: prompt=2, output=5, outstanding=1, turns=2, think=3", None, 20.0)
    run = ClosedLoopRun(workload)
    (first,) = run.first()
    (second,) = run.after(first, 4.0)
    assert second.arrival_s == 7.0
    assert second.follow_up is None
    (other,) = run.after(second, 9.0)
    assert (other.arrival_s, other.follow_up is None) == (9.0, False)
    assert other.runs[0].text != first.runs[0].text
    (third,) = run.after(other, 17.0)  # whose second turn would come when the run is over
    assert (third.arrival_s, third.follow_up is None) == (17.0, False)
    assert run.after(third, 20.0) == []
    (given_up,) = run.next_after("chat", 10.0)  # after a failure: no second turn
    assert given_up.arrival_s == 10.0


def test_instructions_are_drawn_evenly_and_have_lengths_of_their_own() -> None:
    workload = build("prompt=5, output=5, rate=1, instruction=uniform(10,1000), instructions=4", 400)
    first = [one.runs[0] for one in workload.requests]
    assert len(set(first)) == 4
    assert len({run.num_tokens for run in first}) == 4
    assert min(map(first.count, set(first))) > 60
    assert all(one.prompt_len == one.runs[0].num_tokens + 5 for one in workload.requests)


def test_a_recording_keeps_its_texts_unless_its_prompts_are_replaced() -> None:
    recorded = build("mooncake, arrivals=recorded", 2)
    assert [len(one.runs) for one in recorded.requests] == [14, 15]
    assert recorded.requests[0].runs[0] == recorded.requests[1].runs[0]
    assert all(one.runs == () for one in build("mooncake, arrivals=recorded, prompt=100", 2).requests)
    begun = build("mooncake, arrivals=recorded, instruction=10", 2).requests[0]
    assert (begun.prompt_len, begun.runs[1]) == (6768, recorded.requests[0].runs[0])


def test_the_turns_of_a_lead_in_are_in_it() -> None:
    workload = window_of(build("chat: prompt=2, output=5, rate=1, cv=0, turns=2"), TimeWindow(2.5, 9.0, 5.0))
    led_in = [[turn.class_name for turn in turns_of(one)] for one in workload.requests]
    assert led_in == [["chat" + LEAD_IN] * 2] * 2 + [["chat"] * 2] * 2


@each("setting", ["turns=2", "instruction=9"])
def test_a_load_generator_refuses_what_it_does_not_send(setting: str) -> None:
    with pytest.raises(ConfigError, match="is for simulations"):
        plan_synthetic(
            f"prompt=2, output=5, rate=1, {setting}",
            seed=0,
            num_requests=1,
            duration_s=None,
            limits=LengthLimits(),
        )
