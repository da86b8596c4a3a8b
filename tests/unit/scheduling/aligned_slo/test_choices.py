"""Choices of other papers: levels of time left, a knapsack of first tokens, hidden caches for those without room."""

from typing import Any

import pytest

from alignedserve.config.sections import ClusterConfig, DecodeWorkerConfig, SchedulingConfig
from alignedserve.core.errors import ConfigError
from alignedserve.scheduling.policies import make_policy, wanted_mechanisms
from alignedserve.scheduling.policy import DeviceMemory, Mechanism
from alignedserve.scheduling.topology import require_effect
from tests.harnesses.policy_run import PolicyRun, random_arrivals
from tests.harnesses.scheduling import assert_sound, scheduled_of, view_of
from tests.support.marks import each

# Its next token is due in 90 ms; an iteration takes 12 ms, and it has nothing ahead of its schedule.
_ANSWER = {
    "prompt_len": 90,
    "num_generated": 10,
    "ttft_s": 1.0,
    "tpot_s": 0.1,
    "first_token_s": 0.09,
    "last_token_s": 0.99,
}


def scheduled(rows: dict[str, dict[str, Any]], params: dict[str, bool], **view: Any) -> dict[str, int]:
    of = view_of(rows, **view)
    plan = make_policy("aligned_slo", params).plan(of)
    assert_sound(of, plan)
    return scheduled_of(of, plan)


def test_in_a_level_of_the_time_left_the_first_to_come_goes_and_not_the_shortest() -> None:
    rows = {"first": {"prompt_len": 40, "predicted_len": 10}, "second": {"prompt_len": 30, "predicted_len": 10}}
    assert scheduled(rows, {}, max_running_requests=1) == {"second": 30}
    assert scheduled(rows, {"levels": True}, max_running_requests=1) == {"first": 40}
    longer = rows | {"first": {"prompt_len": 40, "predicted_len": 100}}  # three levels further down
    assert scheduled(longer, {"levels": True}, max_running_requests=1) == {"second": 30}


def test_a_knapsack_takes_who_has_waited_longest_for_each_block_where_blocks_are_short() -> None:
    old = {"prompt_len": 48, "ttft_s": 2.0, "arrival_s": 0.1}
    rows = {"old": old, "new": {"prompt_len": 32, "ttft_s": 2.0, "arrival_s": 0.9}}
    assert scheduled(rows, {}, now=1.0, num_blocks=4) == {"new": 32}
    assert scheduled(rows, {"knapsack": True}, now=1.0, num_blocks=4) == {"old": 48}
    assert list(scheduled(rows, {"knapsack": True}, now=1.0, num_blocks=5)) == ["new", "old"]


def test_an_urgent_first_token_without_room_for_keys_and_values_has_a_hidden_cache() -> None:
    rows = {"answer": _ANSWER, "question": {"prompt_len": 60, "ttft_s": 1.0, "tpot_s": 0.1, "arrival_s": 0.2}}
    memory = {"now": 1.0, "num_blocks": 9, "hidden_ratio": 0.5}  # two are free, of four that it needs
    assert scheduled(rows, {}, **memory) == {"answer": 1}
    assert scheduled(rows, {"hidden_caches": True}, **memory) == {"answer": 1, "question": 60}
    assert is_hidden(rows, **memory)
    assert not is_hidden(rows, **memory | {"num_blocks": 11})  # there is room
    assert not is_hidden(rows, **memory | {"hidden_ratio": None})  # the engine has no such caches


def is_hidden(rows: dict[str, dict[str, Any]], **view: Any) -> bool:
    plan = make_policy("aligned_slo", {"hidden_caches": True}).plan(view_of(rows, **view))
    return any(part.is_hidden for part in plan.scheduled)


def test_a_hidden_cache_is_asked_of_the_engine_only_where_it_is_set() -> None:
    def wanted(**params: bool) -> frozenset[Mechanism]:
        return wanted_mechanisms(SchedulingConfig(policy="aligned_slo", policy_params=params))

    assert Mechanism.HIDDEN_CACHE in wanted(hidden_caches=True)
    assert Mechanism.HIDDEN_CACHE not in wanted()


def test_hidden_caches_beside_a_pool_for_decodes_are_refused() -> None:
    scheduling = SchedulingConfig(policy_params={"hidden_caches": True})
    config = ClusterConfig(scheduling=scheduling, decode=DecodeWorkerConfig(pool_bytes=1 << 20))
    with pytest.raises(ConfigError, match=r"hidden_caches has no effect beside decode\.pool_bytes"):
        require_effect(config)


@each("choice", ["levels", "knapsack", "hidden_caches"])
def test_with_each_of_them_every_request_ends_exactly_once(choice: str) -> None:

    memory = DeviceMemory(30, 30, 16, 300, hidden_ratio=0.5)
    arrivals = random_arrivals(5, 40)
    courses = PolicyRun(make_policy("aligned_slo", {choice: True}), memory).run(arrivals)
    assert {name: len(course.token_times_s) for name, course in courses.items()} == {
        str(one.request.request_id): one.output_len for one in arrivals
    }
