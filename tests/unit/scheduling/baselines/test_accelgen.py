"""AccelGen's decisions, one by one; the first is the example of docs/policies/accelgen.md."""

from typing import Any

import numpy as np
import pytest

from alignedserve.scheduling.iteration_scheduler import PolicyIterationScheduler
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policies.accelgen import AccelgenConfig, Pivot, find_pivot, urgency_of
from alignedserve.scheduling.policy import IterationLimits, WorkerView
from alignedserve.scheduling.scheduler import Scheduler
from tests.harnesses.scheduling import EasyCosts, assert_sound, evicted_of, request_of, scheduled_of, view_of
from tests.support.marks import each

PIVOT = {"pivot_len": 100}  # 0.11 s with the easy costs: 909 tokens per second
CHAT = {"prompt_len": 40, "num_generated": 10, "tpot_s": 0.1875, "ttft_s": 1.0}
QUEUE = {
    "chat": CHAT,
    "a": {"prompt_len": 100, "ttft_s": 2.0, "waits_since_s": -0.5},
    "b": {"prompt_len": 60, "ttft_s": 1.5, "waits_since_s": -0.2},
    "c": {"prompt_len": 90, "ttft_s": 1.5, "waits_since_s": -0.14},
    "d": {"prompt_len": 30, "ttft_s": 5.0},
}


def planned(view: WorkerView, **settings: Any) -> dict[str, int]:
    plan = make_policy("accelgen", PIVOT | settings).plan(view)
    assert_sound(view, plan)
    return scheduled_of(view, plan)


def example() -> WorkerView:
    return view_of(QUEUE, num_blocks=17, history=[0.11])  # 13 of them free


def test_the_example_of_the_page() -> None:
    urgency = urgency_of(example(), AccelgenConfig(), chunk_len=100.0, longest_s=0.11)
    assert urgency.remaining_s.round(4).tolist() == [0.0775, 1.39, 1.19, 1.25, 4.89]
    assert planned(example()) == {"chat": 1, "a": 100, "b": 60}


def test_without_multi_resource_batching_the_queue_is_taken_in_order() -> None:
    assert planned(example(), multi_resource=False) == {"chat": 1, "b": 60, "c": 90}
    cut = planned(example(), multi_resource=False, reserve_prompts=False)
    assert cut == {"chat": 1, "b": 60, "c": 90, "a": 19}


def test_without_prioritisation_the_earliest_are_compared() -> None:
    queue = {name: fields | {"arrival_s": fields.get("waits_since_s", 0.0)} for name, fields in QUEUE.items()}
    queue["d"] |= {"arrival_s": -1.0, "waits_since_s": -1.0}
    view = view_of(queue, num_blocks=17, history=[0.11])
    assert planned(view, prioritisation=False) == {"chat": 1, "a": 100, "d": 30}
    assert planned(view, prioritisation=False, gamma_s=0.1) == {"chat": 1, "d": 30}


def test_without_dynamic_chunking_chunks_have_one_length() -> None:
    view = view_of({"chat": CHAT, "a": {"prompt_len": 200, "ttft_s": 9.0}}, history=[0.11])
    assert planned(view, dynamic_chunking=False, static_chunk_len=64) == {"chat": 1, "a": 64}
    assert planned(view, dynamic_chunking=False, static_chunk_len=1000) == {"chat": 1, "a": 200}
    assert planned(view) == {"chat": 1, "a": 169}  # 909 * 0.1875 - 1, as it is too long for one iteration


def test_the_pivot_is_the_smallest_forward_size_near_the_best_rate() -> None:
    # 1000 n / (10 + n) tokens per second: 128 is the first multiple of 64 with 90 % of what 8 192 have.
    assert find_pivot(EasyCosts(), AccelgenConfig()) == Pivot(128, EasyCosts().base_s + 128 * EasyCosts().token_s)
    assert find_pivot(EasyCosts(), AccelgenConfig(saturation=0.01)).num_tokens == 896
    assert find_pivot(EasyCosts(), AccelgenConfig(pivot_len=768)).duration_s == pytest.approx(0.778)


@each(("now", "remaining_s"), [(5.0, 5.89), (11.0, -0.11), (20.0, -9.11)])
def test_a_deadline_is_spread_evenly_and_the_difference_carried(now: float, remaining_s: float) -> None:
    # 1 chunk and 99 more tokens in 100 s; 10 tokens are there, so that the eleventh is due at 11 s.
    row = {"be": True, "prompt_len": 50, "max_tokens": 100, "num_generated": 10, "deadline_s": 100.0}
    view = view_of({"offline": row}, now=now, history=[0.11])
    urgency = urgency_of(view, AccelgenConfig(), chunk_len=100.0, longest_s=0.11)
    assert urgency.slo_s.tolist() == [1.0]
    assert urgency.remaining_s.tolist() == [pytest.approx(remaining_s)]


def test_every_request_has_an_slo() -> None:
    rows = {"prompt": {}, "decode": {"num_generated": 1}, "batch": {"be": True, "max_tokens": 3600}}
    urgency = urgency_of(view_of(rows), AccelgenConfig(), chunk_len=100.0, longest_s=0.1)
    assert urgency.slo_s.tolist() == [1.0, 0.1875, 1.0]
    assert np.isfinite(urgency.remaining_s).all()


def test_a_long_prompt_waits_for_the_one_before_it() -> None:
    rows = {
        "first": {"prompt_len": 5000, "num_cached": 160, "num_blocks": 10, "ttft_s": 90.0},
        "second": {"prompt_len": 5000, "ttft_s": 90.0},
        "short": {"prompt_len": 30, "ttft_s": 90.0},
    }
    assert planned(view_of(rows, history=[0.11])) == {"first": 512}
    assert planned(view_of(rows | {"first": {"prompt_len": 30, "ttft_s": 90.0}}, history=[0.11])) == {"second": 512}
    cached = rows["first"] | {"num_cached": 4800, "num_blocks": 300}
    assert planned(view_of(rows | {"first": cached}, history=[0.11])) == {"first": 200, "short": 30}


RESERVED = {"watermark": 0.0, "reserve_prompts": True}


def test_blocks_for_the_rest_of_a_prompt_are_kept_once_it_has_begun() -> None:
    rows = {
        "begun": {"prompt_len": 320, "num_cached": 160, "num_blocks": 10, "ttft_s": 9.0, "num_preemptions": 2},
        "urgent": {"prompt_len": 48, "ttft_s": 0.2},
    }
    short = view_of(rows, num_blocks=22, history=[0.11])  # 12 free, of which 10 are for the rest
    assert planned(short, **RESERVED) == {"begun": 160}
    assert planned(short, **RESERVED | {"reserve_prompts": False}) == {"urgent": 48, "begun": 133}
    enough = view_of(rows, num_blocks=23, history=[0.11])
    assert planned(enough, **RESERVED) == {"urgent": 48, "begun": 133}  # 909 * 0.2 - 48


def test_a_prompt_begins_only_where_all_of_it_fits() -> None:
    rows = {"chat": CHAT | {"prompt_len": 150, "tpot_s": 9.0}, "long": {"prompt_len": 5000, "ttft_s": 90.0}}
    short, enough = (view_of(rows, num_blocks=num_blocks, history=[0.11]) for num_blocks in (322, 323))  # 10 held
    assert planned(short, **RESERVED) == {"chat": 1}
    assert planned(short, **RESERVED | {"reserve_prompts": False}) == {"chat": 1, "long": 511}
    assert planned(enough, **RESERVED) == {"chat": 1, "long": 511}


URGENT = {"prompt_len": 64, "ttft_s": 1.0, "waits_since_s": -0.8}
HOLDERS = {
    "pressing": {"prompt_len": 30, "num_generated": 2, "tpot_s": 0.2},
    "loose": {"prompt_len": 30, "num_generated": 2, "tpot_s": 5.0},
    "looser": {"prompt_len": 30, "num_generated": 2, "tpot_s": 9.0},
}


def outcome(rows: dict[str, dict[str, Any]]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    view = view_of(rows, num_blocks=8, history=[0.11])  # 6 held, 2 free, 4 wanted
    plan = make_policy("accelgen", PIVOT).plan(view)
    assert_sound(view, plan)
    return scheduled_of(view, plan), evicted_of(view, plan)


def test_who_can_wait_longest_gives_way_to_the_urgent() -> None:
    scheduled, evictions = outcome(HOLDERS | {"urgent": URGENT})
    assert scheduled == {"pressing": 1, "urgent": 64, "loose": 1}
    assert evictions == [("looser", "drop")]


def test_who_has_given_way_twice_does_not_again() -> None:
    _, evictions = outcome(HOLDERS | {"looser": HOLDERS["looser"] | {"num_preemptions": 2}, "urgent": URGENT})
    assert evictions == [("loose", "drop")]


@each(("since_s", "evictions"), [(-30.0, []), (-60.0, [("looser", "drop")])])
def test_who_is_late_preempts_only_when_it_starves(since_s: float, evictions: list[tuple[str, str]]) -> None:
    assert outcome(HOLDERS | {"urgent": URGENT | {"waits_since_s": since_s}})[1] == evictions


def test_no_request_gives_way_to_a_prompt_that_would_not_fit_anyhow() -> None:
    scheduled, evictions = outcome(HOLDERS | {"urgent": URGENT | {"prompt_len": 500}})
    assert (scheduled, evictions) == ({"pressing": 1, "loose": 1, "looser": 1}, [])


def test_among_equals_the_later_one_gives_way() -> None:
    full = {"prompt_len": 31, "num_generated": 2, "tpot_s": 9.0}  # each needs a third block
    view = view_of({"one": full, "two": full}, num_blocks=4, history=[0.11])
    plan = make_policy("accelgen").plan(view)
    assert (scheduled_of(view, plan), evicted_of(view, plan)) == ({"one": 1}, [("two", "drop")])


def test_on_a_decode_worker_it_only_pauses() -> None:
    view = view_of(HOLDERS, max_running_requests=2, can_evict=False)
    assert planned(view) == {"pressing": 1, "loose": 1}


@each("watermark", [0.0, 0.01, 0.5])
def test_on_a_prefill_worker_where_blocks_are_held_compute_alone_decides(watermark: float) -> None:
    policy = make_policy("accelgen", PIVOT | {"watermark": watermark})
    scheduler = PolicyIterationScheduler(Scheduler(policy, EasyCosts(), IterationLimits(64, 512)))
    for name in "abc":
        request = request_of(name, QUEUE[name] | {"arrival_s": QUEUE[name]["waits_since_s"]})
        scheduler.enter(request, 0.0, num_cached=0, num_generated=0, predicted_len=None)
    # 909 * 1.5 tokens allowed, 512 in an iteration: the largest demand leaves least of them.
    assert scheduler.choose(0.0) == (("a", 100), ("c", 90), ("b", 60))
