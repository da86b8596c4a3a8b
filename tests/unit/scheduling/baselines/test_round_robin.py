"""Round robin and the oracle: whose turn it is, who gives way; the examples of their pages."""

from typing import Any

import numpy as np
import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import IterationPolicy, WorkerView
from alignedserve.scheduling.runtime_estimate import RequestRuntimeModel
from lab.policies.fastserve import queue_of
from tests.harnesses.scheduling import assert_sound, decision_of, evicted_of, scheduled_of, view_of
from tests.support.marks import each


def decode(context_len: int, **fields: Any) -> dict[str, Any]:
    return {"prompt_len": context_len - 4, "num_generated": 4} | fields


def turns(policy: IterationPolicy, view: WorkerView, count: int) -> list[dict[str, int]]:
    found = []
    for _ in range(count):
        plan = policy.plan(view)
        assert_sound(view, plan)
        found.append(scheduled_of(view, plan))
    return found


def test_the_example_of_the_page() -> None:
    rows = {
        "A": decode(100, arrival_s=1.0),
        "B": {"prompt_len": 30, "arrival_s": 2.0},
        "c": decode(300, be=True),
        "d": {"be": True, "prompt_len": 200, "arrival_s": 0.5},
        "e": {"be": True, "prompt_len": 400, "arrival_s": 0.6},
    }
    view = view_of(rows, max_tokens=512)
    assert turns(make_policy("round_robin"), view, 3) == [{"A": 1, "B": 30}, {"c": 1, "d": 200}, {"A": 1, "B": 30}]


def test_a_class_that_can_go_on_is_in_every_second_iteration() -> None:
    rows = {"rt": decode(20), "waits": {"prompt_len": 9}} | {
        f"be{number}": decode(20, be=True) for number in range(200)
    }
    served = turns(make_policy("round_robin"), view_of(rows, max_running_requests=256), 6)
    assert [sorted(turn) == ["rt", "waits"] for turn in served] == [True, False] * 3


def test_an_empty_class_passes_its_turn() -> None:
    policy = make_policy("round_robin")
    alone = view_of({"be": decode(20, be=True)})
    both = view_of({"be": decode(20, be=True), "rt": decode(20)})
    assert turns(policy, alone, 2) == [{"be": 1}, {"be": 1}]
    assert turns(policy, both, 2) == [{"rt": 1}, {"be": 1}]


def test_running_requests_keep_their_places_and_the_rest_goes_by_arrival() -> None:
    rows = {
        "late": {"prompt_len": 8, "arrival_s": 3.0},
        "early": {"prompt_len": 8, "arrival_s": 1.0},
        "runs": decode(20, arrival_s=2.0),
    }
    assert turns(make_policy("round_robin", {"batch_size": 2}), view_of(rows), 1) == [{"runs": 1, "early": 8}]


def test_none_overtakes_a_prompt_that_does_not_fit() -> None:
    rows: dict[str, dict[str, Any]] = {
        "long": {"prompt_len": 100},
        "short": {"prompt_len": 8, "arrival_s": 1.0},
        "runs": decode(20, arrival_s=2.0),
    }
    assert turns(make_policy("round_robin"), view_of(rows, num_blocks=5), 1) == [{"runs": 1}]


def test_a_prompt_longer_than_an_iteration_takes_what_the_decodes_leave() -> None:
    rows: dict[str, dict[str, Any]] = {"long": {"prompt_len": 100}, "runs": decode(20, arrival_s=2.0)}
    assert turns(make_policy("round_robin"), view_of(rows, max_tokens=48), 1) == [{"runs": 1, "long": 47}]


def test_who_lacks_a_block_takes_it_from_the_latest_of_its_class() -> None:
    rows = {
        "late": decode(33, arrival_s=2.0),
        "early": decode(33, arrival_s=1.0),
        "be": decode(33, arrival_s=3.0, be=True),
    }
    assert decision_of("round_robin", rows, num_blocks=6, num_free_host=100) == ({"early": 1}, [("late", "drop")])


def test_a_class_that_lacks_blocks_passes_its_turn() -> None:
    rows = {"rt": decode(33, arrival_s=1.0), "be": decode(20, be=True)}
    assert turns(make_policy("round_robin"), view_of(rows, num_blocks=4), 2) == [{"be": 1}, {"be": 1}]


def test_where_no_request_can_go_on_the_earliest_takes_from_the_latest() -> None:
    rows = {"rt": decode(33, arrival_s=2.0), "be": decode(33, arrival_s=1.0, be=True)}
    view = view_of(rows, num_blocks=4)
    plan = make_policy("round_robin").plan(view)
    assert (scheduled_of(view, plan), evicted_of(view, plan)) == ({"be": 1}, [("rt", "drop")])


def test_the_batch_size_is_positive() -> None:
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        make_policy("round_robin", {"batch_size": 0})


def planned(rows: dict[str, dict[str, Any]], **worker: Any) -> tuple[dict[str, int], list[str]]:
    scheduled, evicted = decision_of("oracle", rows, **worker)
    return scheduled, [request_id for request_id, _ in evicted]


def test_the_longest_prompt_is_given_up_for_the_others() -> None:
    rows = {
        "a": {"prompt_len": 300, "ttft_s": 0.35},
        "b": {"prompt_len": 80, "ttft_s": 0.2001},
        "c": {"prompt_len": 80, "ttft_s": 0.4},
    }
    assert planned(rows) == ({"b": 80, "c": 80, "a": 30}, [])
    assert planned({"a": rows["a"]}) == ({"a": 300}, [])


def test_an_iteration_is_as_long_as_the_least_slack_allows() -> None:
    # 5 tokens are due by 0.5 s. The last 4 take 21.46 ms each once both decode, so 314 ms are left for this iteration,
    # of which 11.46 go to the decode.
    decode = {"prompt_len": 40, "num_generated": 6, "predicted_len": 11, "tpot_s": 0.05, "arrival_s": 0.0}
    rows = {"decode": decode, "prompt": {"prompt_len": 900, "ttft_s": 9.0}}
    assert planned(rows, now=0.1, max_tokens=1000)[0] == {"decode": 1, "prompt": 302}


def test_what_cannot_hold_its_slo_any_more_is_last_and_the_shortest_first() -> None:
    rows = {
        "late and long": {"prompt_len": 200, "ttft_s": 0.05},
        "late": {"prompt_len": 60, "ttft_s": 0.05},
        "in time": {"prompt_len": 100, "ttft_s": 5.0},
    }
    assert planned(rows, max_tokens=170)[0] == {"in time": 100, "late": 60, "late and long": 10}


def test_a_prompt_begins_only_where_memory_lasts_to_the_end_of_all() -> None:
    rows = {
        "decode": {"prompt_len": 40, "num_generated": 1, "predicted_len": 60},
        "prompt": {"prompt_len": 50, "predicted_len": 60},
    }
    assert planned(rows, num_blocks=14)[0] == {"decode": 1}  # 100 and 110 tokens, each with a block begun
    assert planned(rows, num_blocks=16)[0] == {"decode": 1, "prompt": 50}


def test_who_is_late_makes_room() -> None:
    rows = {
        "late": {"prompt_len": 90, "num_generated": 1, "predicted_len": 60, "tpot_s": 0.001},
        "prompt": {"prompt_len": 50, "predicted_len": 60, "ttft_s": 9.0},
    }
    assert planned(rows, num_blocks=10) == ({"prompt": 50}, ["late"])


# FastServe: which queue a request joins, when it sinks, when it is promoted, and whom it displaces.

_RUNTIME = RequestRuntimeModel(prefill_token_s=0.001, decode_context_s=0.0, decode_s=0.010)  # quanta: 10, 20, 40, 80 ms
_Rows = dict[str, dict[str, Any]]

# The example of docs/policies/fastserve.md.
_EXAMPLE: _Rows = {
    "A": {"arrival_s": 12.5, "service_s": 0.13, "prompt_len": 30, "num_generated": 4},
    "B": {"arrival_s": 12.6, "service_s": 0.035, "prompt_len": 10, "num_generated": 3},
    "C": {"arrival_s": 12.9, "prompt_len": 8},
    "D": {"arrival_s": 12.8, "prompt_len": 70},
    "E": {"arrival_s": 0.0, "service_s": 0.16, "prompt_len": 20, "num_generated": 15, "num_swapped": 34},
}
_FULL = {"now": 13.0, "num_blocks": 5, "num_free_host": 1000}


def _decide(rows: _Rows, worker: dict[str, Any], **config: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    return decision_of("fastserve", rows, {"runtime": _RUNTIME, **config}, **worker)


def _queue(prefill: float, service: float, num_promotions: int = 0) -> int:
    """Return the queue by times in quanta of the first of five."""
    arrays = (np.array([value], np.float64) for value in (prefill, service, num_promotions))
    return int(queue_of(*arrays, num_queues=5)[0])


def test_the_example_of_its_page() -> None:
    assert _decide(_EXAMPLE, _FULL) == ({"C": 8, "E": 1, "B": 1}, [("A", "swap")])


@each(
    ("prefill", "queue"), [(0.2, 0), (1.0, 0), (1.1, 1), (2.0, 1), (3.0, 2), (4.0, 2), (8.0, 3), (9.0, 4), (500.0, 4)]
)
def test_a_request_joins_the_first_queue_whose_quantum_covers_its_prefill(prefill: float, queue: int) -> None:
    assert _queue(prefill, 0.0) == queue


@each(
    ("service", "queue"), [(0.9, 0), (1.0, 1), (2.9, 1), (3.0, 2), (6.9, 2), (7.0, 3), (14.9, 3), (15.0, 4), (99.0, 4)]
)
def test_who_joined_the_first_queue_sinks_with_each_quantum(service: float, queue: int) -> None:
    assert _queue(1.0, service) == queue


@each(("service", "queue"), [(3.9, 2), (4.0, 3), (11.9, 3), (12.0, 4)])
def test_who_skipped_queues_begins_with_the_quantum_it_joined(service: float, queue: int) -> None:
    assert _queue(3.0, service) == queue


@each(("service", "num_promotions", "queue"), [(0.0, 1, 0), (15.9, 1, 0), (16.0, 1, 1), (30.0, 1, 4), (30.0, 2, 0)])
def test_a_promotion_pays_for_one_way_down(service: float, num_promotions: int, queue: int) -> None:
    assert _queue(500.0, service, num_promotions) == queue


def test_equals_do_not_displace_each_other() -> None:
    rows = {
        "resident": {"arrival_s": 5.0, "prompt_len": 60, "num_generated": 1},
        "earlier": {"arrival_s": 4.0, "prompt_len": 60},
    }
    assert _decide(rows, {"now": 6.0, "num_blocks": 4, "num_free_host": 1000}) == ({"resident": 1}, [])


def test_a_promotion_that_is_further_away_than_the_turn_is_not_waited_for() -> None:
    """Both are in the last queue and run after the newcomer's quantum of 10 ms, long before either is promoted."""
    rows = {
        "earlier": {"arrival_s": 0.0, "service_s": 2.2, "prompt_len": 30, "num_generated": 4},  # promoted in 0.2 s
        "later": {"arrival_s": 1.0, "service_s": 1.1, "prompt_len": 30, "num_generated": 4},  # promoted in 0.1 s
        "new": {"arrival_s": 12.0, "prompt_len": 8},
    }
    assert _decide(rows, {"now": 12.0, "num_blocks": 6, "num_free_host": 1000}) == (
        {"new": 8, "earlier": 1},
        [("later", "swap")],
    )


def test_a_paused_cache_leaves_ahead_of_need_where_the_pass_hides_it() -> None:
    """One place, two of eight blocks to be kept free: the last queue's cache is copied beside the prompt."""
    rows = {
        "new": {"arrival_s": 5.0, "prompt_len": 10},
        "paused": {"arrival_s": 0.0, "service_s": 0.5, "prompt_len": 92, "num_generated": 3},
    }
    settings = {"now": 5.0, "num_blocks": 8, "num_free_host": 1000, "max_running_requests": 1}
    assert _decide(rows, settings, watermark=0.25) == ({"new": 10}, [("paused", "swap")])
    assert _decide(rows, settings, watermark=0.125)[1] == []


def test_without_a_quantum_the_shortest_decode_is_one() -> None:
    """EasyCosts: 11 ms and context; a prompt of 10 tokens is computed in fewer, one of 30 in more."""
    rows = {"longer": {"arrival_s": 0.0, "prompt_len": 30}, "short": {"arrival_s": 1.0, "prompt_len": 9}}
    view = view_of(rows, now=1.0)
    assert list(scheduled_of(view, make_policy("fastserve").plan(view))) == ["short", "longer"]
