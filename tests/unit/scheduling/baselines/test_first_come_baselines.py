"""Orca, Sarathi-Serve, FastGen and DistServe; the first tests are the examples of their pages."""

from typing import Any

from alignedserve.core.ids import RequestId
from alignedserve.scheduling.policies import policy_entry
from router.policies.bypass import DirectHandoff
from router.state import WorkerRecord
from tests.harnesses.scheduling import decision_of
from tests.support.marks import each
from tests.support.samples import request, worker

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
