"""First come, first served, as vLLM does it: what an iteration holds, who is preempted, who waits for whom."""

from collections.abc import Mapping
from typing import Any

from alignedserve.core.ids import RequestId
from alignedserve.scheduling.policies import policy_entry
from alignedserve.scheduling.policy import EvictionMode
from router.policies import DirectHandoff, make_prefill_order
from router.state import WorkerRecord
from tests.harnesses.scheduling import decision_of
from tests.support.marks import each
from tests.support.samples import request, worker

_Rows = dict[str, dict[str, Any]]

# The example of docs/policies/fcfs.md.
_EXAMPLE: _Rows = {
    "A": {"arrival_s": 1.0, "prompt_len": 30, "num_generated": 3},  # 32 tokens in two full blocks
    "B": {"arrival_s": 2.0, "prompt_len": 46, "num_generated": 3},  # 48 in three
    "C": {"arrival_s": 3.0, "prompt_len": 20},
    "D": {"arrival_s": 4.0, "prompt_len": 40},
    "E": {"arrival_s": 5.0, "prompt_len": 4},
}


def test_the_example_of_its_page_prompts_first() -> None:
    assert decision_of("fcfs", _EXAMPLE, max_tokens=62, num_blocks=20)[0] == {"C": 20, "D": 40}


def test_the_example_of_its_page_without_room_for_a_prompt() -> None:
    assert decision_of("fcfs", _EXAMPLE, num_blocks=6) == ({"A": 1}, [("B", "drop")])


def test_the_example_of_its_page_after_that() -> None:
    rows = {**_EXAMPLE, "A": {**_EXAMPLE["A"], "num_generated": 4}, "B": {**_EXAMPLE["B"], "num_cached": 0}}
    assert decision_of("fcfs", rows, num_blocks=6) == ({"A": 1}, [])


def test_decodes_go_together_and_no_prompt_beside_them() -> None:
    assert decision_of(
        "fcfs", {"b": {"arrival_s": 2.0, "num_generated": 1}, "a": {"arrival_s": 1.0, "num_generated": 9}}
    )[0] == {"a": 1, "b": 1}


def test_none_overtakes_the_prompt_that_does_not_fit() -> None:
    rows = {"a": {"arrival_s": 1.0, "prompt_len": 40}, "b": {"prompt_len": 30, "arrival_s": 2.0},
            "c": {"arrival_s": 3.0, "prompt_len": 5}}  # fmt: skip
    assert decision_of("fcfs", rows, max_tokens=60)[0] == {"a": 40}


def test_running_requests_take_places_from_prompts() -> None:
    assert decision_of("fcfs", _EXAMPLE, max_running_requests=3)[0] == {"C": 20}


def test_a_new_prompt_leaves_the_watermark_free() -> None:
    """20 blocks, 5 held, 3 for the prompt: 12 are left, which is a watermark of 0.6 but not of 0.65."""
    rows = {name: _EXAMPLE[name] for name in ("A", "B", "D")}
    assert decision_of("fcfs", rows, {"watermark": 0.6}, num_blocks=20)[0] == {"D": 40}
    assert decision_of("fcfs", rows, {"watermark": 0.65}, num_blocks=20)[0] == {"A": 1, "B": 1}


def test_alone_a_prompt_may_have_all() -> None:
    assert decision_of("fcfs", {"a": {"prompt_len": 320}}, {"watermark": 0.5}, num_blocks=20)[0] == {"a": 320}


def test_a_prompt_longer_than_an_iteration_goes_in_parts() -> None:
    rows = {"a": {"arrival_s": 1.0, "prompt_len": 150}, "b": {"arrival_s": 0.0, "prompt_len": 20}}
    assert decision_of("fcfs", {"a": rows["a"]}, max_tokens=100)[0] == {"a": 100}
    rows["a"]["num_cached"] = 100
    assert decision_of("fcfs", rows, max_tokens=100)[0] == {"a": 50, "b": 20}


def test_a_prompt_begun_in_parts_is_not_held_up_by_the_watermark() -> None:
    rows = {"a": {"prompt_len": 318, "num_cached": 300}}
    assert decision_of("fcfs", rows, {"watermark": 0.1}, num_blocks=20)[0] == {"a": 18}


def test_a_prompt_longer_than_memory_is_passed_over() -> None:
    rows = {"a": {"arrival_s": 1.0, "prompt_len": 161}, "b": {"arrival_s": 2.0, "prompt_len": 160}}
    assert decision_of("fcfs", rows, num_blocks=10)[0] == {"b": 160}


def test_the_last_to_arrive_is_preempted_and_swapped_if_so_configured() -> None:
    assert decision_of(
        "fcfs",
        {name: _EXAMPLE[name] for name in ("A", "B")},
        {"preemption": EvictionMode.SWAP},
        num_blocks=5,
        num_free_host=48,
    ) == ({"A": 1}, [("B", "swap")])


def test_a_full_host_drops() -> None:
    assert decision_of(
        "fcfs",
        {name: _EXAMPLE[name] for name in ("A", "B")},
        {"preemption": EvictionMode.SWAP},
        num_blocks=5,
        num_free_host=47,
    )[1] == [("B", "drop")]


def test_a_prompt_begun_in_parts_is_a_victim_too() -> None:
    rows = {"A": _EXAMPLE["A"], "late": {"arrival_s": 9.0, "prompt_len": 600, "num_cached": 512}}
    assert decision_of("fcfs", rows, {"preemption": EvictionMode.SWAP}, num_blocks=34, num_free_host=1000) == (
        {"A": 1},
        [("late", "drop")],
    )


def test_who_outgrows_the_memory_last_leaves_itself() -> None:
    rows = {"early": {"arrival_s": 0.0, "prompt_len": 30, "num_generated": 2}, "A": _EXAMPLE["A"]}
    assert decision_of("fcfs", rows, num_blocks=4) == ({"early": 1}, [("A", "drop")])


def test_who_is_swapped_out_comes_back_before_any_prompt_begins() -> None:
    swapped = {"arrival_s": 2.0, "prompt_len": 30, "num_generated": 3, "num_swapped": 32}
    rows = {"A": _EXAMPLE["A"], "swapped": swapped, "new": {"arrival_s": 0.0, "prompt_len": 5}}
    assert decision_of("fcfs", rows, num_free_host=100)[0] == {"A": 1, "swapped": 1}


def test_no_request_comes_back_while_one_leaves_or_into_the_watermark() -> None:
    swapped = {"arrival_s": 9.0, "prompt_len": 10, "num_generated": 3, "num_swapped": 12}
    rows = {"A": _EXAMPLE["A"], "B": _EXAMPLE["B"], "swapped": swapped}
    assert decision_of("fcfs", rows, num_blocks=5, num_free_host=100)[0] == {"A": 1}
    rows = {"A": _EXAMPLE["A"], "swapped": swapped}
    assert decision_of("fcfs", rows, {"watermark": 0.25}, num_blocks=4, num_free_host=100)[0] == {"A": 1}
    assert decision_of("fcfs", rows, {"watermark": 0.2}, num_blocks=4, num_free_host=100)[0] == {"A": 1, "swapped": 1}


def test_on_a_prefill_worker_prompts_hold_their_blocks() -> None:
    rows = {
        "a": {"arrival_s": 1.0, "prompt_len": 160, "num_blocks": 10},
        "b": {"arrival_s": 2.0, "prompt_len": 160, "num_blocks": 10},
    }
    assert decision_of("fcfs", rows, num_blocks=20, can_evict=False)[0] == {"a": 160, "b": 160}


def test_on_a_decode_worker_no_request_leaves() -> None:
    rows = {"A": _EXAMPLE["A"], "B": {"arrival_s": 2.0, "prompt_len": 40, "num_generated": 3}}
    assert decision_of("fcfs", rows, num_blocks=5, can_evict=False)[0] == {"B": 1}


Rows = Mapping[str, Any]

# The example of both pages: blocks of 16 tokens, 14 in all, of which 2 are free.
EXAMPLE: Rows = {
    "first": {"arrival_s": 1.0, "be": True, "prompt_len": 60, "num_generated": 5},  # 64 tokens in four full blocks
    "second": {"arrival_s": 2.0, "be": True, "prompt_len": 100, "num_generated": 3},  # seven
    "chat": {"arrival_s": 3.0, "prompt_len": 10, "num_generated": 3},  # one
    "next": {"arrival_s": 4.0, "be": True, "prompt_len": 20},  # needs two
    "question": {"arrival_s": 5.0, "prompt_len": 40},  # needs three
}


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
    assert decision_of(name, EXAMPLE, num_blocks=14) == (scheduled, evicted)


@each("name", ["fcfs_classed", "sarathi_classed"])
def test_within_a_class_they_are_what_they_were(name: str) -> None:
    for be in (False, True):
        rows = {request_id: {**fields, "be": be} for request_id, fields in EXAMPLE.items()}
        for num_blocks in (12, 13, 14, 15, 16, 17, 40):
            unclassed = name.removesuffix("_classed")
            assert decision_of(name, rows, num_blocks=num_blocks) == decision_of(unclassed, rows, num_blocks=num_blocks)


def test_a_best_effort_prompt_does_not_stop_real_time_decodes() -> None:
    rows = {"chat": EXAMPLE["chat"], "document": {"be": True, "prompt_len": 200}}
    assert decision_of("fcfs", rows)[0] == {"document": 200}
    assert decision_of("fcfs_classed", rows)[0] == {"chat": 1}
    assert decision_of("sarathi_classed", rows)[0] == {"chat": 1, "document": 200}


@each("name", ["fcfs_classed", "sarathi_classed"])
def test_best_effort_has_it_all_while_there_is_no_real_time_request(name: str) -> None:
    rows = {"old": {"be": True, "prompt_len": 30}, "new": {"be": True, "prompt_len": 40, "arrival_s": 1.0}}
    assert decision_of(name, rows)[0] == {"old": 30, "new": 40}


@each("name", ["fcfs_classed", "sarathi_classed"])
def test_places_go_to_real_time_requests_first(name: str) -> None:
    rows = {
        "document": {"be": True, "prompt_len": 20, "num_generated": 2},
        "chat": {"prompt_len": 20, "num_generated": 2, "arrival_s": 1.0},
    }
    assert decision_of(name, rows, max_running_requests=1) == ({"chat": 1}, [])  # it pauses, and keeps its cache


@each("name", ["fcfs_classed", "sarathi_classed"])
def test_a_real_time_decode_takes_its_block_from_best_effort(name: str) -> None:
    rows = {
        "document": {"be": True, "prompt_len": 30, "num_generated": 3},
        "chat": {"prompt_len": 30, "num_generated": 3, "arrival_s": 1.0},
    }
    assert decision_of(name, rows, num_blocks=4) == ({"chat": 1}, [("document", "drop")])


@each("name", ["fcfs_classed", "sarathi_classed"])
def test_none_is_preempted_in_vain(name: str) -> None:
    rows = {
        "chat": {"prompt_len": 60, "num_generated": 3},
        "document": {"be": True, "prompt_len": 10, "num_generated": 3, "arrival_s": 1.0},
        "question": {"prompt_len": 60, "arrival_s": 2.0},
    }
    assert decision_of(name, rows, num_blocks=6) == ({"chat": 1, "document": 1}, [])


def test_best_effort_does_not_pass_a_real_time_prompt_that_waits_for_memory() -> None:
    rows = {
        "chat": {"prompt_len": 60, "num_generated": 3},
        "question": {"prompt_len": 60, "arrival_s": 1.0},
        "document": {"be": True, "prompt_len": 10},
    }
    assert decision_of("sarathi_classed", rows, num_blocks=6) == ({"chat": 1}, [])


def test_a_swapped_out_document_holds_up_no_question() -> None:
    swapped = {"be": True, "prompt_len": 40, "num_generated": 2, "num_swapped": 41}
    rows = {"document": swapped, "question": {"prompt_len": 20, "arrival_s": 1.0}}
    settings = {"preemption": "swap"}
    assert decision_of("fcfs", rows, settings, num_blocks=20, num_free_host=100)[0] == {"document": 1}
    assert decision_of("fcfs_classed", rows, settings, num_blocks=20, num_free_host=100)[0] == {"question": 20}


def test_a_swapped_out_chat_takes_its_blocks_back_from_a_document() -> None:
    rows = {
        "document": {"be": True, "prompt_len": 40, "num_generated": 2},
        "chat": {"prompt_len": 40, "num_generated": 2, "num_swapped": 41, "arrival_s": 1.0},
    }
    settings = {"preemption": "swap"}
    assert decision_of("fcfs", rows, settings, num_blocks=5, num_free_host=100) == ({"document": 1}, [])
    result = decision_of("fcfs_classed", rows, settings, num_blocks=5, num_free_host=100)
    assert result == ({"chat": 1}, [("document", "swap")])


@each("name", ["fcfs_classed", "sarathi_classed"])
def test_the_router_has_their_order(name: str) -> None:
    assert make_prefill_order(policy_entry(name).prefill_order).knows_classes
    assert not make_prefill_order(policy_entry(name.removesuffix("_classed")).prefill_order).knows_classes


# Orca, Sarathi-Serve, FastGen and DistServe; the first tests are the examples of their pages.

# Two decodes, a prompt of 300 tokens with 100 computed, and two that wait: in blocks of 16, 4 + 2 + 7 are held.
WORKER: dict[str, dict[str, Any]] = {
    "one": {"prompt_len": 50, "num_generated": 3, "max_tokens": 10},
    "two": {"prompt_len": 20, "num_generated": 9, "max_tokens": 20},
    "begun": {"prompt_len": 300, "num_cached": 100, "num_blocks": 7, "max_tokens": 20},
    "long": {"prompt_len": 400, "max_tokens": 20},
    "short": {"prompt_len": 30, "max_tokens": 20},
}


def planned(
    name: str, rows: dict[str, dict[str, Any]], settings: dict[str, Any], **worker: Any
) -> tuple[dict[str, int], list[str]]:
    scheduled, evicted = decision_of(name, rows, settings, **worker)
    return scheduled, [request_id for request_id, _ in evicted]


@each(
    ("name", "settings", "scheduled"),
    [
        ("sarathi", {"token_budget": 256}, {"one": 1, "two": 1, "begun": 200, "long": 54}),
        ("fastgen", {"token_budget": 256}, {"one": 1, "two": 1, "begun": 200, "long": 54}),
        ("orca", {}, {"one": 1, "two": 1, "begun": 200}),  # the long one is not cut, and none overtakes it
    ],
)
def test_with_plenty_of_memory(name: str, settings: dict[str, Any], scheduled: dict[str, int]) -> None:
    assert planned(name, WORKER, settings, max_tokens=512) == (scheduled, [])


@each("name", ["sarathi", "fastgen"])
def test_none_overtakes_a_prompt_that_waits_for_memory(name: str) -> None:
    # Of 40 blocks 13 are held and 12 more are wanted for the begun prompt; the long one would need 25.
    assert planned(name, WORKER, {"token_budget": 256}, num_blocks=40)[0] == {"one": 1, "two": 1, "begun": 200}


def test_fastgen_goes_on_with_a_prompt_only_where_all_that_is_left_fits() -> None:
    rows = WORKER | {"one": WORKER["one"] | {"prompt_len": 62}}  # takes one of the 12 blocks that are wanted
    assert planned("fastgen", rows, {"token_budget": 64}, num_blocks=25)[0] == {"one": 1, "two": 1}
    assert planned("sarathi", rows, {"token_budget": 64}, num_blocks=25) == ({"one": 1, "two": 1}, ["begun"])


FULL: dict[str, dict[str, Any]] = {
    "early": {"prompt_len": 30, "num_generated": 3},  # both need a third block
    "late": {"prompt_len": 30, "num_generated": 3, "arrival_s": 1.0},
}


def test_sarathi_preempts_the_latest_so_that_the_others_do_not_stall() -> None:
    assert planned("sarathi", FULL, {}, num_blocks=4) == ({"early": 1}, ["late"])


def test_fastgen_lets_a_decode_without_a_block_pause() -> None:
    assert planned("fastgen", FULL, {}, num_blocks=5) == ({"early": 1}, [])


def test_fastgen_drops_all_but_the_earliest_when_no_request_can_go_on() -> None:
    rows = FULL | {"latest": {"prompt_len": 30, "num_generated": 3, "arrival_s": 2.0}}
    assert planned("fastgen", rows, {}, num_blocks=6) == ({"early": 1}, ["late", "latest"])


def test_sarathi_admits_a_prompt_only_where_all_of_it_fits() -> None:
    assert planned("sarathi", {"new": {"prompt_len": 200}}, {"token_budget": 64}, num_blocks=12)[0] == {}
    assert planned("sarathi", {"new": {"prompt_len": 200}}, {"token_budget": 64}, num_blocks=13)[0] == {"new": 64}


def test_what_a_begun_prompt_will_need_is_not_given_away() -> None:
    # 10 free, 9 of them the begun prompt's: the decode of 16 cached tokens takes the last one.
    rows = {
        "begun": {"prompt_len": 200, "num_cached": 64, "num_blocks": 4},
        "decode": {"prompt_len": 16, "num_generated": 1},
        "new": {"prompt_len": 10},
    }
    scheduled, _ = planned("sarathi", rows, {"token_budget": 64, "watermark": 0.0}, num_blocks=15)
    assert scheduled == {"decode": 1, "begun": 63}


def test_orca_reserves_memory_for_all_that_a_request_may_generate() -> None:
    rows = {"one": {"prompt_len": 30, "max_tokens": 34}, "two": {"prompt_len": 16, "max_tokens": 16}}
    assert planned("orca", rows, {}, num_blocks=5)[0] == {"one": 30}  # 4 + 2 blocks
    assert planned("orca", rows, {}, num_blocks=6)[0] == {"one": 30, "two": 16}
    assert planned("orca", rows, {"reserved_len": 64}, num_blocks=6)[0] == {"one": 30}  # 4 + 4


def test_orca_batches_no_more_than_it_is_told() -> None:
    rows = {"decode": {"num_generated": 1}} | {f"prompt-{number}": {} for number in range(9)}
    assert len(planned("orca", rows, {})[0]) == 8
    assert len(planned("orca", rows, {"max_batch_size": 3})[0]) == 3


def test_orca_cuts_a_prompt_only_where_the_engine_must() -> None:
    rows = {"huge": {"prompt_len": 900}, "next": {"prompt_len": 16}}
    assert planned("orca", rows, {}, max_tokens=512)[0] == {"huge": 512}


def test_orca_admits_a_limit_beyond_its_memory_alone() -> None:
    rows = {"boundless": {"prompt_len": 30, "max_tokens": 9999}, "next": {"prompt_len": 16}}
    assert planned("orca", rows, {}, num_blocks=10)[0] == {"boundless": 30}


def test_the_example_of_its_page() -> None:
    workers = [WorkerRecord(f"decode-{number}", worker(max_running_requests=2)) for number in range(2)]
    workers[0].decoding.add(RequestId("before"))
    went_to = []
    for name in "ABCD":
        of = request(name)
        target = DirectHandoff().target(of, of.prompt_len, workers)
        went_to.append(target.name if target is not None else "pool")
        if target is not None:
            target.decoding.add(of.request_id)
    assert went_to == ["decode-1", "decode-0", "decode-1", "pool"]


def test_a_worker_that_prefills_is_no_target() -> None:
    colocated = WorkerRecord("decode-0", worker(can_prefill=True))
    assert DirectHandoff().target(request(), 4, [colocated]) is None


def test_it_goes_past_the_pool_and_batches_are_of_any_length() -> None:
    entry = policy_entry("distserve")
    assert (entry.is_direct, entry.batching, entry.prefill_order) == (True, "fcfs", "fcfs")
