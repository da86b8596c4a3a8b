"""Who gives way where not all prompts can be in time: the fewest, and the least important first."""

from itertools import permutations, product
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policies.aligned_slo.forecast import giving_way
from tests.harnesses.scheduling import scheduled_of, view_of

_PROMPTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=6)  # seconds, and slack


def given_way(
    prompts: list[tuple[int, int]], priorities: list[int], stretch: float = 1.0, own_stretch: float = 1.0
) -> list[int]:
    alone_s, slack_s = (np.array(column, np.float64) for column in zip(*prompts, strict=True))
    return giving_way(slack_s, alone_s, np.array(priorities), stretch=stretch, own_stretch=own_stretch)


def in_time(prompts: list[tuple[int, int]], places: list[int], stretch: float = 1.0, own_stretch: float = 1.0) -> bool:
    """Return whether all of these are in time in the order in which they are due."""
    waited_s = 0.0
    for alone_s, slack_s in sorted((prompts[place] for place in places), key=lambda one: one[1]):
        if waited_s + own_stretch * alone_s > slack_s:
            return False
        waited_s += stretch * alone_s
    return True


@settings(max_examples=200)
@given(_PROMPTS)
def test_no_order_has_fewer_late(prompts: list[tuple[int, int]]) -> None:
    def num_late(order: tuple[int, ...]) -> int:
        ends = np.cumsum([prompts[place][0] for place in order])
        return sum(bool(end > prompts[place][1]) for end, place in zip(ends, order, strict=True))

    least = min(map(num_late, permutations(range(len(prompts)))))
    yielding = given_way(prompts, [0] * len(prompts))
    assert len(yielding) == least
    assert in_time(prompts, [place for place in range(len(prompts)) if place not in yielding])


@settings(max_examples=200)
@given(_PROMPTS, st.data(), st.sampled_from([(1.0, 1.0), (2.5, 1.0), (2.5, 2.5)]))
def test_the_rest_are_in_time_and_a_prompt_gives_way_to_none_less_important(
    prompts: list[tuple[int, int]], data: st.DataObject, stretches: tuple[float, float]
) -> None:
    priorities = data.draw(st.lists(st.integers(0, 2), min_size=len(prompts), max_size=len(prompts)))
    yielding = given_way(prompts, priorities, *stretches)
    kept = [place for place in range(len(prompts)) if place not in yielding]
    assert in_time(prompts, kept, *stretches)
    for gone, other in product(yielding, kept):
        if (prompts[other][1], other) < (prompts[gone][1], gone):  # due before it, and so considered with it
            assert priorities[other] <= priorities[gone] or not in_time(prompts, [gone], *stretches)


def test_one_that_can_be_in_time_alone_never_gives_way_to_nobody() -> None:
    assert given_way([(9, 9)], [0], stretch=2.5) == []
    assert given_way([(9, 9)], [0], stretch=2.5, own_stretch=2.5) == [0]  # while late ones wait


def test_the_longest_waits_where_two_others_can_be_in_time() -> None:
    """It is due first, and urgent: computed first, both others would be late."""
    rows: dict[str, dict[str, Any]] = {
        "long": {"prompt_len": 300, "ttft_s": 0.35},
        "one": {"prompt_len": 150, "ttft_s": 0.4},
        "other": {"prompt_len": 150, "ttft_s": 0.42},
    }
    assert list(planned(rows)) == ["one", "other", "long"]
    assert list(planned({"long": rows["long"], "one": {**rows["one"], "ttft_s": 0.9}})) == ["long", "one"]
    # Unless it is more important.
    assert next(iter(planned({**rows, "long": {**rows["long"], "priority": -1}}))) == "long"


def planned(rows: dict[str, dict[str, Any]]) -> dict[str, int]:
    view = view_of(rows)
    return scheduled_of(view, make_policy("aligned_slo").plan(view))
