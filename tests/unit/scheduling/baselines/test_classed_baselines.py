"""`fcfs_classed` and `sarathi_classed`: real-time before best effort in what is admitted, computed and preempted."""

from collections.abc import Mapping
from typing import Any

from alignedserve.scheduling.policies import make_policy, policy_entry
from router.policies import make_prefill_order
from tests.harnesses.scheduling import assert_sound, evicted_of, scheduled_of, view_of
from tests.support.marks import each

Rows = Mapping[str, Any]

# The example of both pages: blocks of 16 tokens, 14 in all, of which 2 are free.
EXAMPLE: Rows = {
    "first": {"arrival_s": 1.0, "be": True, "prompt_len": 60, "num_generated": 5},  # 64 tokens in four full blocks
    "second": {"arrival_s": 2.0, "be": True, "prompt_len": 100, "num_generated": 3},  # seven
    "chat": {"arrival_s": 3.0, "prompt_len": 10, "num_generated": 3},  # one
    "next": {"arrival_s": 4.0, "be": True, "prompt_len": 20},  # needs two
    "question": {"arrival_s": 5.0, "prompt_len": 40},  # needs three
}


def planned(name: str, rows: Rows, settings: dict[str, Any] | None = None, **worker: Any) -> tuple[dict[str, int], Any]:
    view = view_of(rows, **worker)
    plan = make_policy(name, settings).plan(view)
    assert_sound(view, plan)
    return scheduled_of(view, plan), evicted_of(view, plan)


@each(
    ("name", "scheduled", "evicted"),
    [
        ("fcfs", {"next": 20}, []),
        ("fcfs_classed", {"question": 40}, [("second", "drop")]),
        ("sarathi", {"first": 1, "second": 1, "chat": 1}, []),
        ("sarathi_classed", {"chat": 1, "question": 40, "first": 1}, [("second", "drop")]),
    ],
)
def test_the_example_of_their_pages(name: str, scheduled: dict[str, int], evicted: list[tuple[str, str]]) -> None:
    assert planned(name, EXAMPLE, num_blocks=14) == (scheduled, evicted)


@each("name", ["fcfs_classed", "sarathi_classed"])
def test_within_a_class_they_are_what_they_were(name: str) -> None:
    for be in (False, True):
        rows = {request_id: {**fields, "be": be} for request_id, fields in EXAMPLE.items()}
        for num_blocks in (12, 13, 14, 15, 16, 17, 40):
            unclassed = name.removesuffix("_classed")
            assert planned(name, rows, num_blocks=num_blocks) == planned(unclassed, rows, num_blocks=num_blocks)


def test_a_best_effort_prompt_does_not_stop_real_time_decodes() -> None:
    rows = {"chat": EXAMPLE["chat"], "document": {"be": True, "prompt_len": 200}}
    assert planned("fcfs", rows)[0] == {"document": 200}
    assert planned("fcfs_classed", rows)[0] == {"chat": 1}
    assert planned("sarathi_classed", rows)[0] == {"chat": 1, "document": 200}


@each("name", ["fcfs_classed", "sarathi_classed"])
def test_best_effort_has_it_all_while_there_is_no_real_time_request(name: str) -> None:
    rows = {"old": {"be": True, "prompt_len": 30}, "new": {"be": True, "prompt_len": 40, "arrival_s": 1.0}}
    assert planned(name, rows)[0] == {"old": 30, "new": 40}


@each("name", ["fcfs_classed", "sarathi_classed"])
def test_places_go_to_real_time_requests_first(name: str) -> None:
    rows = {
        "document": {"be": True, "prompt_len": 20, "num_generated": 2},
        "chat": {"prompt_len": 20, "num_generated": 2, "arrival_s": 1.0},
    }
    assert planned(name, rows, max_running_requests=1) == ({"chat": 1}, [])  # it pauses, and keeps its cache


@each("name", ["fcfs_classed", "sarathi_classed"])
def test_a_real_time_decode_takes_its_block_from_best_effort(name: str) -> None:
    rows = {
        "document": {"be": True, "prompt_len": 30, "num_generated": 3},
        "chat": {"prompt_len": 30, "num_generated": 3, "arrival_s": 1.0},
    }
    assert planned(name, rows, num_blocks=4) == ({"chat": 1}, [("document", "drop")])


@each("name", ["fcfs_classed", "sarathi_classed"])
def test_none_is_preempted_in_vain(name: str) -> None:
    rows = {
        "chat": {"prompt_len": 60, "num_generated": 3},
        "document": {"be": True, "prompt_len": 10, "num_generated": 3, "arrival_s": 1.0},
        "question": {"prompt_len": 60, "arrival_s": 2.0},
    }
    assert planned(name, rows, num_blocks=6) == ({"chat": 1, "document": 1}, [])


def test_best_effort_does_not_pass_a_real_time_prompt_that_waits_for_memory() -> None:
    rows = {
        "chat": {"prompt_len": 60, "num_generated": 3},
        "question": {"prompt_len": 60, "arrival_s": 1.0},
        "document": {"be": True, "prompt_len": 10},
    }
    assert planned("sarathi_classed", rows, num_blocks=6) == ({"chat": 1}, [])


def test_a_swapped_out_document_holds_up_no_question() -> None:
    swapped = {"be": True, "prompt_len": 40, "num_generated": 2, "num_swapped": 41}
    rows = {"document": swapped, "question": {"prompt_len": 20, "arrival_s": 1.0}}
    settings = {"preemption": "swap"}
    assert planned("fcfs", rows, settings, num_blocks=20, num_free_host=100)[0] == {"document": 1}
    assert planned("fcfs_classed", rows, settings, num_blocks=20, num_free_host=100)[0] == {"question": 20}


def test_a_swapped_out_chat_takes_its_blocks_back_from_a_document() -> None:
    rows = {
        "document": {"be": True, "prompt_len": 40, "num_generated": 2},
        "chat": {"prompt_len": 40, "num_generated": 2, "num_swapped": 41, "arrival_s": 1.0},
    }
    settings = {"preemption": "swap"}
    assert planned("fcfs", rows, settings, num_blocks=5, num_free_host=100) == ({"document": 1}, [])
    result = planned("fcfs_classed", rows, settings, num_blocks=5, num_free_host=100)
    assert result == ({"chat": 1}, [("document", "swap")])


@each("name", ["fcfs_classed", "sarathi_classed"])
def test_the_router_has_their_order(name: str) -> None:
    assert make_prefill_order(policy_entry(name).prefill_order).knows_classes
    assert not make_prefill_order(policy_entry(name.removesuffix("_classed")).prefill_order).knows_classes
