"""Apt-Serve: who gets a cache, of which kind, and in which iteration."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policies import make_policy, policy_config, policy_entry
from alignedserve.scheduling.policies.apt_serve import KnapsackItems, SelectionBudget, hidden_token_s, select
from alignedserve.scheduling.policy import DeviceMemory, IterationPlan, Mechanism, WorkerView
from tests.harnesses.scheduling import EasyCosts, assert_sound, evicted_of, scheduled_of, view_of
from tests.support.marks import each

_NOW = 10.0


def _plan(view: WorkerView, name: str = "apt_serve", **settings: Any) -> IterationPlan:
    plan = make_policy(name, settings).plan(view)
    assert_sound(view, plan)
    return plan


def _hidden_of(view: WorkerView, plan: IterationPlan) -> set[str]:
    return {str(view.table.request_ids[share.row]) for share in plan.scheduled if share.is_hidden}


def _waiting(prompt_len: int, pending_s: float, **more: Any) -> dict[str, Any]:
    return {"prompt_len": prompt_len, "arrival_s": _NOW - pending_s, **more}


def _running(context_len: int, pending_s: float = 0.05, **more: Any) -> dict[str, Any]:
    arrival = {"arrival_s": 1.0, "last_token_s": _NOW - pending_s}
    return {"prompt_len": context_len - 10, "num_generated": 10, **arrival, **more}


# --- the page's example


def _example(**more: Any) -> WorkerView:
    rows = {
        "r": _running(110),
        "a": _waiting(96, 0.9, ttft_s=2.0),
        "b": _waiting(64, 0.8, ttft_s=2.0),
        "c": _waiting(160, 1.6, ttft_s=2.0),
        "d": _waiting(16, 3.0, ttft_s=2.0),
    }
    return view_of(rows, now=_NOW, num_blocks=19, **{"hidden_ratio": 0.5, **more})


def test_the_pages_example() -> None:
    view = _example()
    plan = _plan(view, hidden_token_s=0.0008)
    assert list(scheduled_of(view, plan).items()) == [("b", 64), ("c", 160), ("a", 96)]
    assert _hidden_of(view, plan) == {"a", "c"}


def test_the_pages_example_with_keys_and_values_only() -> None:
    view = _example()
    plan = _plan(view, hybrid_cache=False)
    assert list(scheduled_of(view, plan).items()) == [("b", 64), ("a", 96), ("d", 16)]
    assert not _hidden_of(view, plan)


def test_the_pages_example_in_chunks() -> None:
    view = _example(max_tokens=256)
    plan = _plan(view, "apt_serve_chunked", hidden_token_s=0.0008)
    assert list(scheduled_of(view, plan).items()) == [("r", 1), ("b", 64), ("c", 160), ("a", 31)]
    assert _hidden_of(view, plan) == {"a", "c"}


@each("ratio", [None, 1.0, 2.0])
def test_a_hidden_cache_is_not_offered_where_it_does_not_pay(ratio: float | None) -> None:
    view = _example(hidden_ratio=ratio)
    assert not _hidden_of(view, _plan(view, hidden_token_s=0.0))


# --- memory


def test_the_papers_figure_6() -> None:
    """Its pool of 16 blocks, each of keys, values or hidden vectors, is one of 8 that hold keys and values."""
    memory = DeviceMemory(8, 8, 4, hidden_ratio=0.5)
    assert 2 * memory.blocks_for(11) == len({0, 2, 4} | {8, 10, 12})
    assert 2 * memory.blocks_for(14, is_hidden=True) == len({5, 7, 13, 15})


def test_blocks_for_each_is_blocks_for() -> None:
    lengths = np.arange(1, 200)
    for ratio in (0.5, 0.37, 0.99):
        memory = DeviceMemory(100, 100, 16, hidden_ratio=ratio)
        for is_hidden in (False, True):
            several = memory.blocks_for_each(lengths, is_hidden=np.full(len(lengths), is_hidden))
            assert several.tolist() == [memory.blocks_for(length, is_hidden=is_hidden) for length in lengths.tolist()]


def test_the_densest_get_what_the_limit_on_hidden_tokens_leaves() -> None:
    view = _example()  # b and c may, a may not; keys and values of a then find no room
    plan = _plan(view, hidden_token_s=0.0008, max_hidden_tokens=64 + 160)
    assert scheduled_of(view, plan) == {"b": 64, "c": 160}
    assert _hidden_of(view, plan) == {"b"}


def test_hidden_caches_that_are_held_count_for_the_limit() -> None:
    rows = {"h": _running(100, is_hidden=True, num_blocks=4), "a": _waiting(96, 0.9)}
    view = view_of(rows, now=_NOW, num_blocks=8, hidden_ratio=0.5)
    assert _hidden_of(view, _plan(view, hidden_token_s=0.0, max_hidden_tokens=196)) == {"a"}
    assert not _hidden_of(view, _plan(view, hidden_token_s=0.0, max_hidden_tokens=195))


def test_new_caches_leave_the_watermark_free() -> None:
    rows = {"r": _running(17), "a": _waiting(16 * 8, 1.0)}
    view = view_of(rows, now=_NOW, num_blocks=10)
    assert scheduled_of(view, _plan(view, watermark=0.0)) == {"a": 128}
    assert scheduled_of(view, _plan(view, watermark=0.2)) == {"r": 1}


# --- which iteration


def test_prompts_go_when_they_have_been_pending_for_longer() -> None:
    view = view_of({"r": _running(40, 0.3), "a": _waiting(20, 0.3)}, now=_NOW)
    assert scheduled_of(view, _plan(view)) == {"a": 20}


def test_decodes_go_when_they_have_been_pending_for_longer() -> None:
    view = view_of({"r": _running(40, 0.3), "q": _running(40, 0.3), "a": _waiting(20, 0.5)}, now=_NOW)
    assert scheduled_of(view, _plan(view)) == {"r": 1, "q": 1}


def test_decodes_go_when_no_prompt_fits() -> None:
    view = view_of({"r": _running(40), "a": _waiting(200, 5.0)}, now=_NOW, num_blocks=10)
    assert scheduled_of(view, _plan(view)) == {"r": 1}


def test_a_prompt_longer_than_an_iteration_goes_alone_and_goes_on() -> None:
    rows = {"a": _waiting(100, 1.0, num_cached=64), "b": _waiting(10, 5.0)}
    view = view_of(rows, now=_NOW, max_tokens=64)
    assert scheduled_of(view, _plan(view)) == {"a": 36, "b": 10}
    fresh = view_of({"a": _waiting(100, 1.0)}, now=_NOW, max_tokens=64)
    assert scheduled_of(fresh, _plan(fresh)) == {"a": 64}


def test_the_blocks_that_a_begun_prompt_will_need_are_kept_for_it() -> None:
    rows = {"a": _waiting(100, 0.01, num_cached=64), "r": _running(33, 3.0)}
    view = view_of(rows, now=_NOW, num_blocks=9, max_tokens=64)  # holds 4 and 2, needs 3 more and 1 more
    assert scheduled_of(view, _plan(view)) == {"a": 36}


# --- values


def test_who_is_past_the_slo_goes_last() -> None:
    rows = {"late": _waiting(16, 5.0, ttft_s=1.0), "new": _waiting(160, 0.1, ttft_s=1.0)}
    view = view_of(rows, now=_NOW, num_blocks=10)
    assert scheduled_of(view, _plan(view)) == {"new": 160}


def test_who_is_past_the_slo_may_keep_a_part_of_the_value() -> None:
    rows = {"late": _waiting(160, 5.0, ttft_s=1.0), "new": _waiting(160, 0.9, ttft_s=1.0)}
    view = view_of(rows, now=_NOW, num_blocks=10)
    assert scheduled_of(view, _plan(view)) == {"new": 160}
    assert scheduled_of(view, _plan(view, expired_decay=0.4)) == {"late": 160}


def test_a_preempted_request_counts_from_its_last_token() -> None:
    rows = {
        "again": {**_running(32, 0.2, tpot_s=1.0, ttft_s=0.1), "num_cached": 0},
        "new": _waiting(32, 0.3, ttft_s=1.0),
    }
    view = view_of(rows, now=_NOW, num_blocks=3)
    assert scheduled_of(view, _plan(view)) == {"new": 32}


def test_equals_go_in_the_order_of_arrival() -> None:
    rows = {name: _waiting(32, 0.3) for name in "abc"}
    view = view_of(rows, now=_NOW, num_blocks=4)
    assert scheduled_of(view, _plan(view)) == {"a": 32, "b": 32}


def test_rho_is_what_the_cost_model_says() -> None:
    assert hidden_token_s(_HiddenCosts()) == pytest.approx(0.002)
    assert hidden_token_s(EasyCosts()) == 0.0


@dataclass(frozen=True)
class _HiddenCosts(EasyCosts):
    @override
    def iteration_s(self, work: IterationWork) -> float:
        return EasyCosts.iteration_s(self, work) + 0.002 * work.hidden_context_len


# --- decodes that no longer fit


def test_the_longest_gives_way_to_the_others() -> None:
    rows = {"a": _running(65), "b": _running(33), "c": _running(49)}  # each needs a block more
    view = view_of(rows, now=_NOW, num_blocks=9)
    plan = _plan(view)
    assert evicted_of(view, plan) == [("a", "drop")]
    assert scheduled_of(view, plan) == {"b": 1, "c": 1}


def test_of_equals_the_latest_gives_way() -> None:
    rows = {name: _running(33) for name in "abc"}
    view = view_of(rows, now=_NOW, num_blocks=7)
    plan = _plan(view)
    assert evicted_of(view, plan) == [("c", "drop")]
    assert scheduled_of(view, plan) == {"a": 1, "b": 1}


def test_who_need_not_give_way_only_pauses() -> None:
    rows = {"a": _running(17), "b": _running(17), "c": _running(113), "d": _running(97)}  # 1, 1, 7, 6 blocks held
    view = view_of(rows, now=_NOW, num_blocks=15)
    plan = _plan(view)
    assert evicted_of(view, plan) == [("c", "drop")]
    assert scheduled_of(view, plan) == {"a": 1, "b": 1, "d": 1}


def test_the_chunked_form_takes_no_new_request_when_one_gave_way() -> None:
    rows = {"a": _running(65), "b": _running(33), "new": _waiting(16, 1.0)}
    view = view_of(rows, now=_NOW, num_blocks=6)
    plan = _plan(view, "apt_serve_chunked")
    assert evicted_of(view, plan) == [("a", "drop")]
    assert scheduled_of(view, plan) == {"b": 1}


# --- hidden caches of those who run


def _one_hidden(pending_s: float = 0.05, **rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    hidden = _running(64, pending_s, is_hidden=True, num_blocks=2, tpot_s=1.0)
    return {"h": hidden, "r": _running(40), **rows}  # 2 and 3 blocks held


@each("waiting", [{}, {"w": _waiting(160, 0.04)}])
def test_a_hidden_cache_becomes_keys_and_values_when_there_are_blocks(waiting: dict[str, Any]) -> None:
    view = view_of(_one_hidden(**waiting), now=_NOW, num_blocks=7, hidden_ratio=0.5)
    plan = _plan(view, hidden_token_s=0.001)
    assert evicted_of(view, plan) == [("h", "drop")]
    assert scheduled_of(view, plan) == {"h": 64}
    assert scheduled_of(view, _plan(view, "apt_serve_chunked", hidden_token_s=0.001)) == {"h": 64, "r": 1}


def test_without_blocks_a_hidden_cache_pauses_while_it_costs_more_than_it_gains() -> None:
    """Two requests, 64 tokens, 1 ms for each: 128 ms, and by the block it pays from 256 ms."""
    for pending_s, runs in ((0.255, False), (0.257, True)):
        view = view_of(_one_hidden(pending_s), now=_NOW, num_blocks=6, hidden_ratio=0.5)
        plan = _plan(view, hidden_token_s=0.001)
        assert scheduled_of(view, plan) == ({"h": 1, "r": 1} if runs else {"r": 1})
        assert not plan.evictions


def test_a_hidden_cache_that_costs_nothing_stays() -> None:
    view = view_of(_one_hidden(), now=_NOW, num_blocks=20, hidden_ratio=0.5)
    assert scheduled_of(view, _plan(view, hidden_token_s=0.0)) == {"h": 1, "r": 1}


def test_a_hidden_cache_does_not_pause_past_its_slo() -> None:
    for pending_s, runs in ((0.99, False), (1.01, True)):
        view = view_of(_one_hidden(pending_s), now=_NOW, num_blocks=6, hidden_ratio=0.5)
        assert ("h" in scheduled_of(view, _plan(view, hidden_token_s=0.1))) is runs


def test_a_hidden_cache_does_not_pause_when_no_other_runs() -> None:
    view = view_of({"h": _one_hidden()["h"]}, now=_NOW, num_blocks=3, hidden_ratio=0.5)
    assert scheduled_of(view, _plan(view, hidden_token_s=0.1)) == {"h": 1}


def test_a_hidden_cache_that_pauses_gives_way_first() -> None:
    rows = _one_hidden() | {"r": _running(33)}  # needs a block more
    view = view_of(rows, now=_NOW, num_blocks=4, hidden_ratio=0.5)
    plan = _plan(view, hidden_token_s=0.001)
    assert evicted_of(view, plan) == [("h", "drop")]
    assert scheduled_of(view, plan) == {"r": 1}


# --- the selection


def _candidates(values: list[float], num_blocks: list[int]) -> KnapsackItems:
    blocks = np.array(num_blocks)
    return KnapsackItems(np.array(values), blocks, blocks, np.zeros(len(values)), blocks)


def test_the_best_single_one_goes_first_where_it_alone_is_worth_more() -> None:
    candidates = _candidates([2.0, 9.0], [1, 10])
    assert select(candidates, SelectionBudget(10, 100, 10)).indices.tolist() == [1]
    assert select(candidates, SelectionBudget(11, 100, 10)).indices.tolist() == [0, 1]


def test_what_does_not_fit_is_passed_over() -> None:
    candidates = _candidates([8.0, 9.0, 2.0], [4, 5, 3])
    assert select(candidates, SelectionBudget(7, 100, 10)).indices.tolist() == [0, 2]


def test_a_step_is_taken_only_after_its_hidden_cache() -> None:
    blocks = np.array([4, 8])
    candidates = KnapsackItems(np.array([8.0, 8.0]), blocks, blocks, np.array([0.0, 0.0]), blocks // 2)
    selection = select(candidates, SelectionBudget(5, 100, 10, 1000))
    assert selection.indices.tolist() == [0]
    assert selection.is_hidden.tolist() == [False]


def test_places_and_tokens_bind() -> None:
    candidates = _candidates([4.0, 3.0, 2.0], [1, 1, 1])
    assert select(candidates, SelectionBudget(9, 9, 2)).indices.tolist() == [0, 1]
    assert select(candidates, SelectionBudget(9, 1, 9)).indices.tolist() == [0]


def test_no_budget_and_no_candidates() -> None:
    assert select(_candidates([1.0], [1]), SelectionBudget(0, 9, 9)).indices.tolist() == []
    assert select(_candidates([], []), SelectionBudget(9, 9, 9)).indices.tolist() == []


# --- the entry


@each("name", ["apt_serve", "apt_serve_chunked"])
def test_hidden_caches_are_needed_unless_the_parameter_says_no(name: str) -> None:
    entry = policy_entry(name)
    assert entry.needs_with(policy_config(name)) == {Mechanism.HIDDEN_CACHE}
    assert entry.needs_with(policy_config(name, {"hybrid_cache": False})) == frozenset()


@each(
    ("name", "value"),
    [("max_hidden_tokens", -1), ("hidden_token_s", -0.1), ("expired_decay", 0.0), ("watermark", 1.0)],
)
def test_a_parameter_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        make_policy("apt_serve", {name: value})
