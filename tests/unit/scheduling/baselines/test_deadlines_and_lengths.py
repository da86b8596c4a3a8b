"""`edf`, `srpt` and `qoserve`: their orders against plain ones, and the examples of their pages."""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policies import make_policy, policy_entry
from alignedserve.scheduling.policy import WorkerView
from alignedserve.scheduling.runtime_estimate import RequestRuntimeModel
from lab.policies.qoserve import Needs, yielding
from router.policies import make_prefill_order
from tests.harnesses.scheduling import EasyCosts, assert_sound, evicted_of, scheduled_of, view_of
from tests.support.marks import each

Rows = Mapping[str, Any]

_RUNTIME = RequestRuntimeModel(prefill_token_s=0.001, decode_context_s=0.0, decode_s=0.010)


def planned(name: str, view: WorkerView, **settings: Any) -> tuple[dict[str, int], list[str]]:
    plan = make_policy(name, settings).plan(view)
    assert_sound(view, plan)
    return scheduled_of(view, plan), [request_id for request_id, _ in evicted_of(view, plan)]


# --- the examples

# At 10.0 s; memory for all, 200 tokens an iteration.
EDF_EXAMPLE: Rows = {
    "writes": {"arrival_s": 8.0, "num_generated": 5, "tpot_s": 0.2, "last_token_s": 9.9},  # due at 10.1
    "asks": {"arrival_s": 9.0, "prompt_len": 120, "ttft_s": 2.0},  # at 11.0
    "hurries": {"arrival_s": 9.5, "prompt_len": 60, "ttft_s": 1.0},  # at 10.5
    "plain": {"arrival_s": 7.0, "prompt_len": 30},  # never
    "line": {"arrival_s": 1.0, "be": True, "prompt_len": 90, "deadline_s": 9.8},  # at 10.8
    "document": {"arrival_s": 0.0, "be": True, "prompt_len": 80},  # never
}


def test_the_example_of_the_page_of_edf() -> None:
    view = view_of(EDF_EXAMPLE, now=10.0)
    assert planned("edf", view, token_budget=200)[0] == {"writes": 1, "hurries": 60, "line": 90, "asks": 49}
    every = planned("edf", view, token_budget=400)[0]
    assert list(every) == ["writes", "hurries", "line", "asks", "plain", "document"]


# 1 ms for a token of a prompt, 10 ms for one of an answer.
SRPT_EXAMPLE: Rows = {
    "novel": {"arrival_s": 1.0, "prompt_len": 50, "num_generated": 20, "predicted_len": 200},  # 1.80 s
    "letter": {"arrival_s": 2.0, "prompt_len": 100, "predicted_len": 30},  # 0.40 s
    "word": {"arrival_s": 3.0, "prompt_len": 150, "predicted_len": 2},  # 0.17 s
    "line": {"arrival_s": 0.0, "be": True, "prompt_len": 20, "predicted_len": 1},  # 0.03 s
}


def test_the_example_of_the_page_of_srpt() -> None:
    view = view_of(SRPT_EXAMPLE, now=4.0)
    assert planned("srpt", view, token_budget=200, runtime=_RUNTIME)[0] == {"novel": 1, "word": 150, "letter": 49}
    every = planned("srpt", view, token_budget=400, runtime=_RUNTIME)[0]
    assert list(every) == ["novel", "word", "letter", "line"]


# At 10.0 s, 10 ms an iteration and 1 ms a token.
QOSERVE_EXAMPLE: Rows = {
    "writes": {"arrival_s": 9.0, "num_generated": 5, "tpot_s": 0.26, "first_token_s": 9.0},  # due at 10.3
    "long": {"arrival_s": 9.6, "prompt_len": 300, "ttft_s": 1.0},  # at 10.6, and 2.4 for its tokens: 13.0
    "short": {"arrival_s": 9.9, "prompt_len": 100, "ttft_s": 1.0},  # 10.9 + 0.8 = 11.7
    "too late": {"arrival_s": 9.5, "prompt_len": 290, "ttft_s": 0.6},  # due at 10.1, which takes 0.3 s
    "line": {"arrival_s": 1.0, "be": True, "prompt_len": 90},
}


def test_the_example_of_the_page_of_qoserve() -> None:
    view = view_of(QOSERVE_EXAMPLE, now=10.0, costs=EasyCosts(context_s=0.0))
    # 0.3 s / 1.2 = 0.25 s: 240 tokens, one of them a decode
    assert planned("qoserve", view)[0] == {"writes": 1, "short": 100, "long": 139}
    assert planned("qoserve", view, alpha_s=0.0)[0] == {"writes": 1, "long": 239}
    assert planned("qoserve", view, relegation=False, alpha_s=0.0)[0] == {"writes": 1, "too late": 239}
    fixed = {"dynamic_chunks": False, "token_budget": 512}
    assert planned("qoserve", view, **fixed)[0] == {"writes": 1, "short": 100, "long": 300, "too late": 111}


# --- orders, by plain arithmetic on the fields of each request


def random_rows(rng: random.Random) -> dict[str, dict[str, Any]]:
    """Return up to eight requests of both classes, decoding and not, with and without objectives."""
    rows: dict[str, dict[str, Any]] = {}
    for number in range(rng.randrange(1, 9)):
        fields: dict[str, Any] = {
            "arrival_s": rng.choice((0.0, 3.0, 5.0)) + rng.random(),
            "prompt_len": rng.randrange(2, 40),
            "be": rng.random() < 0.5,
            "predicted_len": rng.choice((1.0, 9.0, 60.0)),
            "ttft_s": rng.choice((None, 0.5, 2.0, 9.0)),
            "tpot_s": rng.choice((None, 0.1, 0.9)),
            "deadline_s": rng.choice((None, 8.0, 80.0)),
        }
        if rng.random() < 0.4:
            begun_s = fields["arrival_s"] + rng.random()
            fields |= {"num_generated": rng.randrange(1, 12), "first_token_s": begun_s, "last_token_s": begun_s + 0.5}
        rows[f"r{number}"] = fields
    return rows


def or_inf(value: float | None) -> float:
    return math.inf if value is None else value


def is_prompt(fields: Rows) -> bool:
    return "num_generated" not in fields


def edf_key(fields: Rows) -> tuple[float, ...]:
    due_s = fields["arrival_s"] + or_inf(fields["ttft_s"])
    if not is_prompt(fields):
        due_s = fields["last_token_s"] + or_inf(fields["tpot_s"])
    if due_s == math.inf:
        due_s = fields["arrival_s"] + or_inf(fields["deadline_s"])
    group = 0 if due_s < math.inf else 1 + fields["be"]
    return (group, is_prompt(fields), due_s, fields["arrival_s"])


def srpt_key(fields: Rows) -> tuple[float, ...]:
    total, num_generated = fields["predicted_len"], fields.get("num_generated", 0)
    while total <= num_generated:
        total *= 2
    left_s = 0.010 * max(min(total, 100) - num_generated, 1)
    return (
        fields["be"],
        is_prompt(fields),
        left_s + 0.001 * fields["prompt_len"] * is_prompt(fields),
        fields["arrival_s"],
    )


@each(("name", "key", "settings"), [("edf", edf_key, {}), ("srpt", srpt_key, {"runtime": _RUNTIME})])
def test_requests_compute_in_the_order_of_their_keys(
    name: str, key: Callable[[Rows], tuple[float, ...]], settings: dict[str, Any]
) -> None:
    rng = random.Random(5)
    for _ in range(200):
        rows = random_rows(rng)
        scheduled, _ = planned(name, view_of(rows, now=6.0), **settings)
        assert list(scheduled) == sorted(rows, key=lambda request_id: key(rows[request_id]))


# --- memory

FULL: Rows = {
    "document": {"be": True, "prompt_len": 60, "num_generated": 3, "deadline_s": 7.0, "predicted_len": 4},
    "chat": {"arrival_s": 5.0, "prompt_len": 30, "ttft_s": 5.0, "predicted_len": 90},
}


@each("name", ["edf", "srpt", "qoserve"])
def test_chat_takes_blocks_from_a_document_whatever_its_deadline_and_length(name: str) -> None:
    assert planned(name, view_of(FULL, now=6.0, num_blocks=5)) == ({"chat": 30}, ["document"])
    among_equals = {request_id: {**fields, "be": False} for request_id, fields in FULL.items()}
    assert planned(name, view_of(among_equals, now=6.0, num_blocks=5)) == ({"document": 1}, [])


@each("name", ["edf", "srpt", "qoserve"])
def test_a_document_that_waits_for_memory_holds_up_no_chat(name: str) -> None:
    line = {"be": True, "prompt_len": 90, "deadline_s": 6.5, "predicted_len": 1}
    rows: Rows = {
        "writes": {"num_generated": 2, "tpot_s": 1.0, "last_token_s": 5.9},
        "line": line,
        "chat": FULL["chat"],
    }
    assert planned(name, view_of(rows, now=6.0, num_blocks=6))[0] == {"writes": 1, "chat": 30}


# --- QoServe


def test_a_relegated_prompt_comes_after_all_that_can_be_in_time_and_before_best_effort() -> None:
    late = {"arrival_s": 0.0, "prompt_len": 50, "ttft_s": 1.0}
    rows: dict[str, Any] = {
        "late": late,
        "line": {"be": True, "prompt_len": 9},
        "chat": {"arrival_s": 5.9, "ttft_s": 1.0},
    }
    rows["batch"] = {"be": True, "prompt_len": 20, "deadline_s": 600.0}
    assert list(planned("qoserve", view_of(rows, now=6.0))[0]) == ["chat", "batch", "late", "line"]


def test_a_deadline_counts_the_predicted_answer() -> None:
    line = {"be": True, "prompt_len": 20, "deadline_s": 1.0}
    rows = {"short": {**line, "predicted_len": 10}, "long": {**line, "predicted_len": 100}}
    view = view_of(rows, costs=EasyCosts(context_s=0.0))  # 11 ms a token: 0.14 s and 1.1 s
    assert list(planned("qoserve", view)[0]) == ["short", "long"]
    rows["long"]["deadline_s"] = 1.2
    view = view_of(rows, costs=EasyCosts(context_s=0.0), max_tokens=20)
    assert list(planned("qoserve", view, alpha_s=0.0)[0]) == ["short"]  # both are in time, and the earlier one is first


def test_the_least_important_yield_where_there_is_not_time_for_all() -> None:
    """Three prompts of 0.2 s, the last one due in 0.5 s; without hints all three stay where they are."""
    prompt = {"prompt_len": 190, "ttft_s": 0.5}
    rows = {"first": prompt, "second": {**prompt, "arrival_s": 0.001}, "third": {**prompt, "arrival_s": 0.002}}
    assert list(planned("qoserve", view_of(rows, max_tokens=200))[0]) == ["first", "second"]
    rows["first"] = {**prompt, "priority": 1}
    assert list(planned("qoserve", view_of(rows, max_tokens=200))[0]) == ["second", "third"]
    rows["first"] = {**prompt, "be": True}
    assert list(planned("qoserve", view_of(rows, max_tokens=200))[0]) == ["second", "third"]


def test_who_yields_against_the_rule_itself() -> None:
    rng = random.Random(7)
    for _ in range(400):
        count = rng.randrange(1, 7)
        needed = np.array([rng.randrange(1, 9) for _ in range(count)], float)
        due = np.array([rng.randrange(1, 30) for _ in range(count)], float)
        importance = np.array([rng.randrange(3) for _ in range(count)])
        gone = yielding(np.arange(count), 0.0, Needs(due, needed, needed), importance)
        assert gone == plainly_yielding(needed.tolist(), due.tolist(), importance.tolist())


def plainly_yielding(needed: list[float], due: list[float], importance: list[int]) -> list[int]:
    """Return who yields by the rule, looked at anew for every request."""
    gone: list[int] = []
    for last in range(len(due)):
        while True:
            before = [row for row in range(last + 1) if row not in gone]
            less = [row for row in before if importance[row] > importance[last]]
            if sum(needed[row] for row in before) <= due[last] or not less:
                break
            gone.append(max(less, key=lambda row: (importance[row], needed[row], -row)))
    return gone


@each("slack_s", [0.05, 0.121, 0.13, 0.2, 0.31, 0.6, 2.0])
def test_a_chunk_is_the_largest_that_the_slack_has_time_for(slack_s: float) -> None:
    rows = {
        "writes": {"num_generated": 1, "tpot_s": slack_s, "first_token_s": 0.0, "prompt_len": 100},
        "begun": {"prompt_len": 400, "num_cached": 37, "ttft_s": 9.0},
    }
    view = view_of(rows, max_tokens=512)

    def seconds(num_tokens: int) -> float:
        work = IterationWork()
        work.add_decode(101)
        work.add_chunk(num_tokens, 37, is_last=num_tokens == 363)
        return view.costs.iteration_s(work)

    in_time = max((count for count in range(1, 364) if 1.2 * seconds(count) <= slack_s), default=0)
    assert planned("qoserve", view)[0] == {"writes": 1, "begun": max(in_time, 127)}


def test_without_an_objective_for_tokens_a_chunk_fills_the_iteration() -> None:
    rows: Rows = {"writes": {"num_generated": 1}, "new": {"prompt_len": 400, "ttft_s": 9.0}}
    assert planned("qoserve", view_of(rows, max_tokens=300))[0] == {"writes": 1, "new": 299}


def test_documents_that_fill_all_places_make_room_for_a_question() -> None:
    writes = {"be": True, "num_generated": 2}
    rows: dict[str, Any] = {
        "one": writes,
        "two": {**writes, "arrival_s": 1.0},
        "chat": {"arrival_s": 2.0, "ttft_s": 9.0},
    }
    assert planned("qoserve", view_of(rows, now=3.0, max_running_requests=2)) == ({"one": 1, "chat": 16}, [])


@each("name", ["edf", "srpt", "qoserve"])
def test_the_router_knows_classes(name: str) -> None:
    assert make_prefill_order(policy_entry(name).prefill_order).knows_classes


@each(
    ("name", "wrong"),
    [
        ("edf", {"token_budget": 0}),
        ("srpt", {"watermark": 1.0}),
        ("qoserve", {"margin": 0.5}),
        ("qoserve", {"alpha_s": -1}),
    ],
)
def test_impossible_parameters_are_refused(name: str, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        make_policy(name, wrong)
