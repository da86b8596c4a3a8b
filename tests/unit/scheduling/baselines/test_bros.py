"""BROS: the order of residual times, Algorithm 1, the batch size, and whose blocks are taken."""

from typing import Any

import numpy as np
import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policies.bros import residual_s
from alignedserve.scheduling.policy import EvictionMode, IterationPlan, PlannedEviction, PlannedShare, WorkerView
from tests.harnesses.policy_run import Arrival, PolicyRun
from tests.harnesses.scheduling import assert_sound, evicted_of, request_of, scheduled_of, view_of
from tests.support.marks import each


def decode(context_len: int, last_token_s: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"prompt_len": context_len - 4, "num_generated": 4, "last_token_s": last_token_s, "tpot_s": 0.2} | fields


def prompt(prompt_len: int, arrival_s: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"prompt_len": prompt_len, "arrival_s": arrival_s, "ttft_s": 0.4, "tpot_s": 0.2} | fields


def best_effort(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "be": True, "ttft_s": None, "tpot_s": None}


def planned(view: WorkerView, **settings: Any) -> IterationPlan:
    plan = make_policy("bros", settings).plan(view)
    assert_sound(view, plan)
    return plan


def packed(view: WorkerView, **settings: Any) -> list[str]:
    return list(scheduled_of(view, planned(view, **settings)))


EXAMPLE = {
    "A": decode(100, last_token_s=9.85),
    "B": prompt(16, arrival_s=9.7),
    "C": decode(200, last_token_s=9.98),
    "d": best_effort(decode(300)),
    "e": best_effort(decode(100)),
    "f": best_effort(prompt(64)),
}


# --- residual time


def test_residual_times_of_the_example() -> None:
    view = view_of(EXAMPLE, now=10.0, history=[0.02])
    assert residual_s(view)[:3].tolist() == pytest.approx([0.05, 0.1, 0.18])
    assert np.isinf(residual_s(view)[3:]).all()


def test_a_prompt_that_needs_more_iterations_has_less_time_for_each() -> None:
    view = view_of({"long": prompt(100)}, now=0.1, max_tokens=48, history=[0.02])
    assert residual_s(view).tolist() == pytest.approx([0.3 - 2 * 0.02])


# --- the packing


def test_the_example_of_the_page() -> None:
    view = view_of(EXAMPLE, now=10.0, history=[0.02])
    plan = planned(view, base_batch_size=4)
    assert scheduled_of(view, plan) == {"A": 1, "B": 16, "d": 1, "e": 1}


def test_the_example_with_a_token_that_comes_too_late_anyway() -> None:
    rows = EXAMPLE | {"A": decode(100, last_token_s=9.805)}  # 5 ms left, an iteration of its own takes 12
    assert packed(view_of(rows, now=10.0, history=[0.02])) == ["B", "A", "d", "e", "f"]


def test_no_more_join_than_the_first_has_time_for() -> None:
    rows = {"now": decode(100, 9.85), "prompt": prompt(40, 9.7), "after": decode(100, 9.95)}
    assert packed(view_of(rows, now=10.0)) == ["now"]  # 52 ms with the prompt; what comes after it is not tried


def test_where_no_request_can_be_in_time_only_places_and_memory_count() -> None:
    rows = {"a": prompt(40, 9.0), "b": prompt(30, 8.0), "be": best_effort(prompt(50))}
    assert packed(view_of(rows, now=10.0)) == ["b", "a", "be"]


def test_equals_go_by_priority_then_arrival() -> None:
    rows = {"third": prompt(8, 1.0), "second": prompt(8, 1.0, priority=-1), "first": prompt(8, 0.9)}
    assert packed(view_of(rows, now=1.1)) == ["first", "second", "third"]


def test_best_effort_goes_by_what_is_to_come_back_then_decodes_first() -> None:
    rows = {
        "prompt": best_effort(prompt(8, 0.0)),
        "swapped": best_effort(decode(40, num_swapped=16)),
        "decode": best_effort(decode(40)),
    }
    assert packed(view_of(rows)) == ["decode", "prompt", "swapped"]


def test_a_copy_that_takes_longer_than_the_time_left_waits() -> None:
    rows = {"rt": decode(100, 9.85), "be": best_effort(decode(700, num_swapped=640))}
    assert packed(view_of(rows, now=10.0)) == ["rt"]  # 64 ms of copying, 50 ms left
    assert packed(view_of({"be": rows["be"]}, now=10.0)) == ["be"]


def test_who_cannot_wait_for_another_iteration_is_not_replaced() -> None:
    rows = {"a": decode(100, 9.85), "b": decode(100, 9.85), "be": best_effort(decode(100))}
    view = view_of(rows, now=10.0, history=[0.04])  # 14 ms now and 40 ms on average do not fit 50 ms
    assert packed(view, base_batch_size=2) == ["a", "b"]
    assert packed(view_of(rows, now=10.0, history=[0.03]), base_batch_size=2) == ["a", "be"]


def test_a_real_time_request_without_slo_is_not_replaced() -> None:
    rows = {"rt": decode(100, tpot_s=None), "be": best_effort(decode(100))}
    assert packed(view_of(rows), base_batch_size=1) == ["rt"]


def test_prompts_are_not_cut_unless_longer_than_an_iteration() -> None:
    rows = {"a": prompt(40), "b": prompt(30), "c": prompt(100, ttft_s=0.39)}
    view = view_of(rows, max_tokens=64)
    assert scheduled_of(view, planned(view)) == {"c": 64}
    view = view_of({"a": rows["a"], "b": rows["b"]}, max_tokens=64)
    assert scheduled_of(view, planned(view)) == {"a": 40}


def test_a_long_best_effort_prompt_waits_for_as_long_as_anyone_decodes() -> None:
    """The paper has no bound on this: its prompts are whole, and fit its objectives."""
    arrivals = [Arrival(request_of("be", best_effort(prompt(400))), 2)]
    arrivals += [Arrival(request_of(f"rt{number}", prompt(8, number * 0.1)), 60) for number in range(20)]
    courses = PolicyRun(make_policy("bros")).run(arrivals)
    last_s = max(course.token_times_s[-1] for name, course in courses.items() if name != "be")
    assert courses["be"].token_times_s[0] > last_s


LONG = prompt(300, ttft_s=1.0, arrival_s=9.99)  # 310 ms alone: never within the 200 ms of a token
DECODES = {"a": decode(100, 9.99), "b": decode(100, 9.95)}


def test_a_prompt_too_long_to_fit_beside_any_decode_does_not_wait_for_their_end() -> None:
    assert packed(view_of(DECODES | {"long": LONG}, now=10.0)) == ["long", "b", "a"]
    late = {"long": LONG, "late": LONG | {"arrival_s": 1.0}}
    assert packed(view_of(DECODES | late, now=10.0)) == ["late", "b", "a"]  # one at a time: an iteration has 512 tokens


def test_such_prompts_wait_for_the_end_of_all_decodes_where_that_is_set() -> None:
    policy = make_policy("bros", {"long_prompts_wait": True})
    view = view_of(DECODES | {"long": LONG}, now=10.0)
    assert list(scheduled_of(view, policy.plan(view))) == ["b", "a"]
    view = view_of({"long": LONG}, now=10.0)
    assert list(scheduled_of(view, policy.plan(view))) == ["long"]


def test_too_long_is_what_does_not_fit_beside_all_the_decodes() -> None:
    rows = {"a": decode(100, 10.0), "b": decode(100, 10.0)}  # 2 ms each, beside 10 ms and 1 ms per token
    assert packed(view_of(rows | {"prompt": prompt(180, 9.99)}, now=10.0)) == ["a", "b", "prompt"]
    assert packed(view_of(rows | {"prompt": prompt(190, 9.99)}, now=10.0)) == ["prompt", "a", "b"]
    soon = DECODES | {"prompt": prompt(180, 9.99)}  # 150 ms now; 200 once both have their token
    assert packed(view_of(soon, now=10.0)) == ["b", "a"]


def test_beside_such_a_prompt_goes_what_those_who_can_still_be_in_time_allow() -> None:
    rows = DECODES | {"long": LONG, "short": prompt(20, ttft_s=0.35, arrival_s=9.99)}
    assert packed(view_of(rows, now=10.0)) == ["long", "b", "a", "short"]  # 334 ms, of 340
    rows["short"] |= {"ttft_s": 0.33}
    assert packed(view_of(rows, now=10.0)) == ["long", "b", "a"]


def test_a_prompt_that_fits_beside_decodes_is_not_preferred_when_it_is_late() -> None:
    rows = {"now": decode(100, 9.85), "late": prompt(150, 2.0)}
    assert packed(view_of(rows, now=10.0)) == ["now"]


def test_decodes_that_stood_back_go_before_the_next_such_prompt() -> None:
    policy = make_policy("bros")
    rows = DECODES | {"long": LONG | {"prompt_len": 900}}  # takes all tokens of an iteration
    first, second, third = (policy.plan(view_of(rows, now=10.0)) for _ in range(3))
    view = view_of(rows)
    assert [list(scheduled_of(view, one)) for one in (first, second, third)] == [["long"], ["b", "a"], ["long"]]


def test_long_prompts_do_not_wait_for_the_end_of_all_decodes() -> None:
    arrivals = [Arrival(request_of(f"rt{number}", prompt(8, number * 0.1)), 60) for number in range(20)]
    arrivals += [Arrival(request_of(f"long{number}", LONG | {"arrival_s": number * 1.0}), 5) for number in range(3)]
    courses = PolicyRun(make_policy("bros")).run(arrivals)
    firsts = [courses[f"long{number}"].token_times_s[0] - number for number in range(3)]
    assert max(firsts) <= 1.0


def test_a_decode_worker_chooses_and_takes_nothing() -> None:
    rows = {"a": decode(17, 9.9), "b": best_effort(decode(300))}
    view = view_of(rows, now=10.0, num_blocks=21, can_evict=False)
    assert packed(view) == ["a", "b"]


# --- the batch size


def test_the_batch_size_doubles_and_falls_back_at_once() -> None:
    policy = make_policy("bros", {"base_batch_size": 1})
    calm = view_of({name: best_effort(decode(20)) for name in "abcdefgh"})
    busy = view_of({"now": decode(100, 9.85), "prompt": prompt(40, 9.7)}, now=10.0)
    sizes = [len(policy.plan(view).scheduled) for view in (calm, calm, calm, busy, calm, calm)]
    assert sizes == [1, 2, 4, 1, 1, 2]


def test_the_batch_size_never_passes_what_the_engine_runs() -> None:
    policy = make_policy("bros", {"base_batch_size": 2})
    calm = view_of({"a": best_effort(decode(20))}, max_running_requests=3)
    busy = view_of({name: decode(20, 9.9) for name in "abcdef"}, now=10.0)
    for _ in range(5):
        policy.plan(calm)
    assert len(policy.plan(busy).scheduled) == 3


@each("name", ["base_batch_size", "batch_growth"])
def test_settings_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        make_policy("bros", {name: 0})


# --- blocks


def full(**memory: Any) -> WorkerView:
    """A prompt of two blocks; two best-effort decodes hold all of them."""
    rows = {
        "be1": best_effort(decode(60, arrival_s=1.0)),
        "be2": best_effort(decode(60, arrival_s=2.0)),
        "rt": prompt(20, 9.9),
    }
    return view_of(rows, now=10.0, num_blocks=8, **memory)


def test_a_whole_best_effort_cache_leaves_where_blocks_are_not_shared() -> None:
    view = full(num_free_host=1000)
    plan = planned(view)
    assert evicted_of(view, plan) == [("be2", "swap")]
    assert plan.evictions[0].num_tokens is None
    assert list(scheduled_of(view, plan)) == ["rt", "be1"]


def sharing(rows: dict[str, dict[str, Any]], num_blocks: int, num_free_host: int = 1000) -> WorkerView:
    return view_of(rows, now=10.0, num_blocks=num_blocks, num_free_host=num_free_host, has_shared_blocks=True)


def test_a_prompt_without_a_block_shares_the_last_one_of_a_best_effort_request() -> None:
    rows = {"be": best_effort(decode(53)), "rt": prompt(40, 9.9)}  # 52 tokens: four slots of the last block
    plan = planned(sharing(rows, num_blocks=6))
    assert (plan.shares, plan.evictions) == ((PlannedShare(1, 0),), ())  # eight slots from the left
    assert [part.row for part in plan.scheduled] == [1, 0]  # and both compute


def test_only_the_slots_that_are_overwritten_leave() -> None:
    rows = {"be": best_effort(decode(60)), "rt": prompt(40, 9.9)}  # 59 tokens: 11 slots of the last block
    plan = planned(sharing(rows, num_blocks=6))
    assert plan.shares == (PlannedShare(1, 0),)
    assert plan.evictions == (PlannedEviction(0, EvictionMode.SWAP, 3),)  # 8 + 11 slots in a block of 16


def test_it_shares_with_the_request_that_has_most_empty_slots() -> None:
    rows = {"full": best_effort(decode(65)), "empty": best_effort(decode(51)), "rt": prompt(3, 9.9)}
    assert planned(sharing(rows, num_blocks=8)).shares == (PlannedShare(2, 1),)


def test_whole_blocks_leave_where_one_share_is_not_enough() -> None:
    rows = {"be1": best_effort(decode(61)), "be2": best_effort(decode(61, arrival_s=1.0)), "rt": prompt(40, 9.9)}
    plan = planned(sharing(rows, num_blocks=8))
    assert plan.shares == (PlannedShare(2, 1),)
    assert plan.evictions == (
        PlannedEviction(1, EvictionMode.SWAP, 4),  # for 8 + 12 slots in one block
        PlannedEviction(0, EvictionMode.SWAP, 12 + 16),
    )


def test_without_room_on_the_host_no_slot_is_overwritten() -> None:
    rows = {"be": best_effort(decode(60)), "rt": prompt(40, 9.9)}
    plan = planned(sharing(rows, num_blocks=6, num_free_host=2))
    assert (plan.shares, evicted_of(sharing(rows, 6), plan)) == ((), [("be", "drop")])


@each("num_free_host", [0, 58])
def test_without_room_on_the_host_the_cache_is_dropped(num_free_host: int) -> None:
    view = full(num_free_host=num_free_host)
    assert evicted_of(view, planned(view)) == [("be2", "drop")]


def test_after_best_effort_the_real_time_request_with_most_time_gives_its_blocks() -> None:
    rows = {
        "old": decode(33, 9.85, arrival_s=1.0),
        "least": decode(64, 9.90, arrival_s=2.0),
        "most": decode(64, 9.95, arrival_s=2.0),
    }
    view = view_of(rows, now=10.0, num_blocks=10, num_free_host=1000)
    plan = planned(view)
    assert evicted_of(view, plan) == [("most", "swap")]
    assert list(scheduled_of(view, plan)) == ["old", "least"]


def test_no_request_takes_from_an_earlier_one_of_its_class() -> None:
    rows = {"old": decode(33, 9.95), "new": decode(33, 9.85, arrival_s=1.0)}
    view = view_of(rows, now=10.0, num_blocks=4, num_free_host=1000)
    plan = planned(view)
    assert (list(scheduled_of(view, plan)), evicted_of(view, plan)) == (["old"], [("new", "swap")])


def test_a_best_effort_prompt_takes_from_none() -> None:
    rows = {"decode": best_effort(decode(60, arrival_s=5.0)), "prompt": best_effort(prompt(30, 1.0))}
    view = view_of(rows, num_blocks=5, num_free_host=1000, now=10.0)
    plan = planned(view)
    assert (list(scheduled_of(view, plan)), plan.evictions) == (["decode"], ())


@each("be", [False, True], ids=["real-time", "best-effort"])
def test_two_equal_requests_never_take_from_each_other_in_turn(be: bool) -> None:
    rows = [prompt(40, ttft_s=5.0, be=be), prompt(40, ttft_s=5.0, be=be)]
    arrivals = [Arrival(request_of(f"r{number}", fields), 60) for number, fields in enumerate(rows)]
    view = view_of({}, num_blocks=7)
    courses = PolicyRun(make_policy("bros"), view.memory).run(arrivals)
    assert [courses[name].num_preemptions for name in ("r0", "r1")] == [0, 1]
