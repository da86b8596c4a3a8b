"""The oracle's decisions; the first is the example of docs/policies/oracle.md."""

from typing import Any

from alignedserve.scheduling.policies import make_policy
from tests.harnesses.scheduling import assert_sound, evicted_of, scheduled_of, view_of


def planned(rows: dict[str, dict[str, Any]], **worker: Any) -> tuple[dict[str, int], list[str]]:
    view = view_of(rows, **worker)
    plan = make_policy("oracle").plan(view)
    assert_sound(view, plan)
    return scheduled_of(view, plan), [request_id for request_id, _ in evicted_of(view, plan)]


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
