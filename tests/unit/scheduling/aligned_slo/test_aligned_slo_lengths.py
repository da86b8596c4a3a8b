"""aligned_slo among requests without any objective: only how much each has left to do counts."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
from typing_extensions import override

from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policies.aligned_slo.packing import in_parts_s
from lab.costmodel.choice import WorkerSpec, make_cost_model
from tests.harnesses.scheduling import EasyCosts, decision_of, scheduled_of, view_of

Rows = dict[str, dict[str, Any]]


def planned(rows: Rows, **worker: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    return decision_of("aligned_slo", rows, **worker)


def crowd(**short: Any) -> Rows:
    """One that has 90 tokens left and holds 7 blocks, and one that wants 2 and has 5 to generate."""
    return {
        "long": {"prompt_len": 100, "num_generated": 10},
        "short": {"prompt_len": 30, "predicted_len": 5, **short},
    }


def test_who_has_far_less_left_takes_the_memory_of_who_has_more() -> None:
    assert planned(crowd(), num_blocks=7, num_free_host=500) == ({"short": 30}, [("long", "swap")])


def test_who_has_more_than_half_of_it_waits() -> None:
    assert planned(crowd(predicted_len=60), num_blocks=7, num_free_host=500) == ({"long": 1}, [])


def test_no_request_leaves_where_that_is_not_enough() -> None:
    rows = crowd(prompt_len=60) | {"other": {"prompt_len": 20, "num_generated": 1, "predicted_len": 8}}
    # Nine blocks are held and one is free; four are wanted. The long one would do, but for one that may not leave.
    rows["long"] |= {"arrival_s": -2000.0}
    assert planned(rows, num_blocks=10, num_free_host=500) == ({"other": 1, "long": 1}, [])


def test_a_place_is_taken_and_the_cache_stays() -> None:
    assert planned(crowd(), max_running_requests=1) == ({"short": 30}, [])


def test_who_has_an_objective_is_not_overtaken() -> None:
    rows = crowd()
    rows["long"] |= {"deadline_s": 1000.0}
    assert planned(rows, num_blocks=7, num_free_host=500) == ({"long": 1}, [])


def test_whose_caches_cost_more_than_the_other_gains_stay() -> None:
    rows = crowd(predicted_len=35)
    rows["long"] |= {"prompt_len": 1000}
    # 1.9 s against 0.4 s, but without host memory 1 009 tokens are computed anew, for 1.0 s.
    assert planned(rows, num_blocks=64, max_running_requests=8)[1] == []


@dataclass(frozen=True)
class _DearLogits(EasyCosts):
    """A row of logits costs as much as four tokens."""

    @override
    def iteration_s(self, work: IterationWork) -> float:
        return super().iteration_s(work) + 0.004 * work.num_sampled


@pytest.mark.parametrize(("num_prompt_logprobs", "num_tokens"), [(None, 186), (1, 37)])
def test_a_prompt_that_is_scored_is_as_long_in_an_iteration_as_its_rows_of_logits_allow(
    num_prompt_logprobs: int | None, num_tokens: int
) -> None:
    """An iteration of documents takes 200 ms, as chat with a TTFT of 1 s has come lately."""
    rows: dict[str, dict[str, Any]] = {
        "scored": {"be": True, "prompt_len": 400, "num_prompt_logprobs": num_prompt_logprobs},
        "chat": {"prompt_len": 10, "ttft_s": 1.0, "arrival_s": 0.9},
    }
    policy = make_policy("aligned_slo")
    policy.plan(view_of(rows, now=1.0, costs=_DearLogits()))
    del rows["chat"]
    view = view_of(rows, now=1.1, costs=_DearLogits())
    assert scheduled_of(view, policy.plan(view)) == {"scored": num_tokens}


@pytest.mark.parametrize("num_cached", [0, 4000])
@pytest.mark.parametrize("part", [64, 500, 2048, 6666, 9000])
def test_it_is_the_sum_of_all_parts(part: int, num_cached: int) -> None:
    """Within a hundredth: a part of which keys cost more than matrices is a little above the mean of two."""
    costs = make_cost_model("roofline", WorkerSpec("opt-13b", "a100-80g"))
    decodes, now, num_tokens = IterationWork(), IterationWork(), 6666
    for context_len in (300, 1100, 4800):
        decodes.add_decode(context_len)
        now.add_decode(context_len)
    now.add_chunk(700, 0, is_last=True)  # another prompt, in this iteration only
    total_s, done = 0.0, 0
    while done < num_tokens:
        iteration, size = (decodes if done else now).copy(), min(part, num_tokens - done)
        iteration.add_chunk(size, num_cached + done, is_last=done + size == num_tokens)
        total_s, done = total_s + costs.iteration_s(iteration), done + size
    takes_s = in_parts_s(costs, num_tokens, part, num_cached, now=now, later=decodes)
    assert takes_s == pytest.approx(total_s, rel=0.01)


def test_without_a_part_it_never_ends() -> None:
    costs = make_cost_model("roofline", WorkerSpec("opt-13b", "a100-80g"))
    assert in_parts_s(costs, 100, 0, 0, now=IterationWork(), later=IterationWork()) == math.inf
