"""ALISE: levels by predicted remaining time, ageing, doubled predictions, and whose cache leaves the device."""

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policies.alise import Preemption
from alignedserve.scheduling.runtime_estimate import RequestRuntimeModel
from tests.harnesses.scheduling import decision_of, view_of
from tests.support.marks import each

_RUNTIME = RequestRuntimeModel(prefill_token_s=0.001, decode_context_s=0.00001, decode_s=0.010)  # level 0: below 0.16 s

# The example of docs/policies/alise.md.
_EXAMPLE = {
    "A": {"arrival_s": 98.0, "service_s": 2.0, "prompt_len": 100, "num_generated": 20, "predicted_len": 400},
    "B": {"arrival_s": 95.0, "service_s": 5.0, "prompt_len": 60, "num_generated": 25, "predicted_len": 10},
    "C": {"arrival_s": 99.9, "prompt_len": 50, "predicted_len": 8},
    "D": {"arrival_s": 99.5, "prompt_len": 40, "predicted_len": 30},
    "E": {
        "arrival_s": 20.0,
        "service_s": 5.0,
        "prompt_len": 30,
        "num_generated": 50,
        "num_swapped": 79,
        "predicted_len": 100,
    },
}


_Rows = dict[str, dict[str, Any]]


def _decide(rows: _Rows, worker: dict[str, Any], **config: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    rows = {name: {"max_tokens": 1000, **fields} for name, fields in rows.items()}
    return decision_of("alise", rows, {"runtime": _RUNTIME, **config}, **worker)


def _uploads(rows: _Rows, worker: dict[str, Any]) -> list[str]:
    view = view_of({name: {"max_tokens": 1000, **fields} for name, fields in rows.items()}, **worker)
    return [str(view.table.request_ids[row]) for row in make_policy("alise", {"runtime": _RUNTIME}).plan(view).uploads]


_FULL: dict[str, Any] = {"now": 100.0, "num_blocks": 16, "num_free_host": 1000}


def test_the_example_of_its_page() -> None:
    assert _decide(_EXAMPLE, _FULL) == ({"C": 50, "E": 1, "B": 1}, [("A", "swap")])


def test_the_example_with_recomputing() -> None:
    assert _decide(_EXAMPLE, _FULL, preemption=Preemption.RECOMPUTE) == ({"C": 50, "E": 1, "B": 1}, [("A", "drop")])


def test_the_example_with_deferring() -> None:
    assert _decide(_EXAMPLE, _FULL, preemption=Preemption.DEFER) == ({"B": 1, "A": 1}, [])


def test_a_full_host_drops() -> None:
    assert _decide(_EXAMPLE, {**_FULL, "num_free_host": 100})[1] == [("A", "drop")]


def test_an_overrun_demotes() -> None:
    """With places for one: the request that overran its prediction waits, though less is left of it."""
    rows = {
        "overran": {"arrival_s": 0.0, "prompt_len": 20, "num_generated": 2, "predicted_len": 2},
        "as predicted": {"arrival_s": 1.0, "prompt_len": 20, "num_generated": 2, "predicted_len": 10},
    }
    assert _decide(rows, {"now": 2.0, "max_running_requests": 1})[0] == {"as predicted": 1}


def test_the_predicted_shortest_goes_first_and_the_earliest_within_a_level() -> None:
    rows = {
        "long": {"arrival_s": 0.0, "predicted_len": 500},
        "second": {"arrival_s": 2.0, "predicted_len": 5},
        "first": {"arrival_s": 1.0, "predicted_len": 10},
    }
    assert list(_decide(rows, {"now": 3.0})[0]) == ["first", "second", "long"]


@each(("waited_s", "first"), [(59.9, "short"), (60.0, "short"), (120.0, "long")])
def test_waiting_raises_a_request_by_a_level(waited_s: float, first: str) -> None:
    """0.5 s are left of the long one, at level 2; after two thresholds it is at level 0, and the earlier one there."""
    rows = {
        "long": {"arrival_s": 0.0, "prompt_len": 20, "predicted_len": 45},
        "short": {"arrival_s": waited_s - 0.01, "prompt_len": 20, "predicted_len": 5},
    }
    assert next(iter(_decide(rows, {"now": waited_s})[0])) == first


def test_being_served_does_not_undo_ageing() -> None:
    rows = {
        "aged": {"arrival_s": 0.0, "service_s": 3.0, "prompt_len": 20, "predicted_len": 500, "num_generated": 5},
        "short": {"arrival_s": 499.0, "prompt_len": 20, "predicted_len": 5},
    }
    rows["aged"] |= {"waits_since_s": 500.0}
    assert _decide(rows, {"now": 500.0, "max_running_requests": 1})[0] == {"aged": 1}


def test_equals_do_not_displace_each_other() -> None:
    rows = {
        "resident": {"arrival_s": 5.0, "prompt_len": 60, "num_generated": 1, "predicted_len": 30},
        "earlier": {"arrival_s": 0.0, "prompt_len": 60, "predicted_len": 30},
    }
    assert _decide(rows, {"now": 6.0, "num_blocks": 4, "num_free_host": 1000}) == ({"resident": 1}, [])


def test_who_outgrows_the_memory_displaces_a_later_equal() -> None:
    rows = {
        "first": {"arrival_s": 0.0, "prompt_len": 30, "num_generated": 3, "predicted_len": 30},
        "second": {"arrival_s": 1.0, "prompt_len": 30, "num_generated": 3, "predicted_len": 30},
    }
    assert _decide(rows, {"now": 2.0, "num_blocks": 4, "num_free_host": 1000}) == ({"first": 1}, [("second", "swap")])


def test_of_a_level_the_longest_wait_ahead_leaves_first() -> None:
    """Both residents have aged from level 5 to 1; `x` has 0.08 s to go to level 0, `y`, who came later, 0.02 s."""
    resident = {"prompt_len": 60, "num_generated": 1, "predicted_len": 400}
    rows = {
        "x": {"arrival_s": 4.58, "service_s": 5.0, **resident},
        "y": {"arrival_s": 8.52, "service_s": 1.0, **resident},
        "new": {"arrival_s": 10.0, "prompt_len": 50, "predicted_len": 8},
    }
    settings = {"now": 10.0, "num_blocks": 9, "num_free_host": 1000}
    assert _decide(rows, settings, age_threshold_s=0.1) == ({"new": 50, "y": 1}, [("x", "swap")])


def test_what_the_pass_hides_comes_back_ahead_of_its_turn() -> None:
    """One place, so the swapped request cannot run; 30 tokens take 3 ms to copy, the prompt 26 ms to compute."""
    rows = {
        "new": {"arrival_s": 0.0, "prompt_len": 16, "predicted_len": 5},
        "next": {"arrival_s": 0.0, "prompt_len": 30, "num_generated": 1, "num_swapped": 30, "predicted_len": 100},
    }
    worker = {"now": 1.0, "max_running_requests": 1, "num_free_host": 1000}
    assert (_decide(rows, worker)[0], _uploads(rows, worker)) == ({"new": 16}, ["next"])


def test_a_copy_that_would_lengthen_the_pass_waits() -> None:
    rows = {
        "new": {"arrival_s": 0.0, "prompt_len": 16, "predicted_len": 5},
        "next": {"arrival_s": 0.0, "prompt_len": 300, "num_generated": 1, "num_swapped": 300, "predicted_len": 100},
    }
    settings = {"now": 1.0, "max_running_requests": 1, "num_free_host": 1000}
    assert _uploads(rows, settings) == []
    assert _uploads(rows, {**settings, "swap_width": 0.625}) == ["next"]


def test_a_prompt_longer_than_an_iteration_begins_with_a_part() -> None:
    assert _decide({"a": {"prompt_len": 700, "predicted_len": 5}}, {})[0] == {"a": 512}


def test_a_prompt_longer_than_memory_is_passed_over() -> None:
    rows = {"endless": {"prompt_len": 300, "predicted_len": 1}, "other": {"prompt_len": 20, "predicted_len": 90}}
    assert _decide(rows, {"num_blocks": 10})[0] == {"other": 20}


def test_without_given_coefficients_the_cost_model_is_asked() -> None:
    view = view_of(_EXAMPLE, **_FULL)
    policy = make_policy("alise")
    assert policy.plan(view) == policy.plan(replace(view))


def test_no_request_takes_what_a_better_one_had_to_leave() -> None:
    """`later` leaves two blocks to `first`, which needs one: the other is not for `worse`, which would fit."""
    equal = {"prompt_len": 30, "num_generated": 3, "predicted_len": 10}
    rows = {
        "first": {"arrival_s": 0.0, **equal},
        "later": {"arrival_s": 1.0, **equal},
        "worse": {"arrival_s": 2.0, "prompt_len": 10, "predicted_len": 100},
    }
    assert _decide(rows, {"now": 3.0, "num_blocks": 4, "num_free_host": 1000}) == ({"first": 1}, [("later", "swap")])


@each("wrong", [{"num_levels": 0}, {"age_threshold_s": 0}, {"watermark": 1.0}, {"preemption": "x"}])
def test_impossible_parameters_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        make_policy("alise", wrong)
