"""Who gives way where not all prompts can be in time: the fewest, and the least important first."""

from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.scheduling.policies.aligned_slo import giving_way

_PROMPTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=6)  # seconds, and slack


def given_way(prompts: list[tuple[int, int]], priorities: Sequence[int], stretch: float = 1.0) -> list[int]:
    alone_s, slack_s = (np.array(column, np.float64) for column in zip(*prompts, strict=True))
    return giving_way(slack_s, alone_s, np.array(priorities), stretch=stretch)


def in_time(prompts: list[tuple[int, int]], places: list[int], stretch: float = 1.0) -> bool:
    """Return whether all of these are in time in the order in which they are due."""
    waited_s = 0.0
    for alone_s, slack_s in sorted((prompts[place] for place in places), key=lambda prompt: prompt[1]):
        if waited_s + alone_s > slack_s:
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
@given(_PROMPTS, st.data(), st.sampled_from([1.0, 2.5]))
def test_the_rest_are_in_time_and_a_prompt_gives_way_to_none_less_important(
    prompts: list[tuple[int, int]], data: st.DataObject, stretch: float
) -> None:
    priorities = data.draw(st.lists(st.integers(0, 2), min_size=len(prompts), max_size=len(prompts)))
    yielding = given_way(prompts, priorities, stretch)
    staying = [place for place in range(len(prompts)) if place not in yielding]
    assert in_time(prompts, staying, stretch)
    for gone, other in product(yielding, staying):
        if (prompts[other][1], other) < (prompts[gone][1], gone):  # due before it, and so considered with it
            assert priorities[other] <= priorities[gone] or not in_time(prompts, [gone], stretch)


def test_a_prompt_that_can_be_in_time_alone_never_gives_way_to_nobody() -> None:
    assert given_way([(9, 9)], [0], stretch=2.5) == []
