"""Scheduling without evictions: in order of arrival, or by a policy."""

import math

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.scheduling.iteration_scheduler import (
    FcfsIterationScheduler,
    IterationScheduler,
    PolicyIterationScheduler,
)
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import IterationLimits
from alignedserve.scheduling.scheduler import Scheduler
from tests.harnesses.scheduling import EasyCosts, Script, Step
from tests.support.samples import request

R1, R2 = RequestId("r1"), RequestId("r2")
LIMITS = IterationLimits(max_running_requests=4, max_tokens=10)


def enter(
    scheduler: IterationScheduler, name: str, prompt_len: int, num_cached: int = 0, num_generated: int = 0
) -> None:
    of = request(name, prompt_len=prompt_len)
    scheduler.enter(of, 0.0, num_cached=num_cached, num_generated=num_generated, predicted_len=None)


def scripted(*steps: Step) -> tuple[PolicyIterationScheduler, Script]:
    script = Script()
    script.steps.extend(steps)
    return PolicyIterationScheduler(Scheduler(script, EasyCosts(), LIMITS)), script


# --- in order


def test_in_order_shares_the_budget_and_goes_on_where_it_was() -> None:
    scheduler = FcfsIterationScheduler(10)
    enter(scheduler, "r1", 12)
    enter(scheduler, "r2", 12, num_cached=3)
    assert [scheduler.choose(0.0) for _ in range(4)] == [((R1, 10),), ((R1, 2), (R2, 8)), ((R2, 1),), ()]


def test_in_order_counts_what_was_generated_elsewhere() -> None:
    scheduler = FcfsIterationScheduler(10)
    enter(scheduler, "r1", 4, num_generated=2)
    assert scheduler.choose(0.0) == ((R1, 6),)


def test_in_order_passes_over_who_has_left() -> None:
    scheduler = FcfsIterationScheduler(10)
    for name in ("r1", "r2", "r3"):
        enter(scheduler, name, 4)
    scheduler.leave(R2)
    scheduler.leave(R2)  # it may be gone already
    assert scheduler.choose(0.0) == ((R1, 4), (RequestId("r3"), 4))


# --- as a policy says


def test_a_policy_chooses_and_sees_that_no_request_can_be_evicted() -> None:
    scheduler, script = scripted(Step(r2=3))
    enter(scheduler, "r1", 4)
    enter(scheduler, "r2", 9, num_cached=2)
    assert scheduler.choose(1.5) == ((R2, 3),)
    assert script.view is not None
    assert (script.view.can_evict, script.view.now) == (False, 1.5)
    assert script.view.table.num_remaining.tolist() == [4, 7]
    assert (script.view.memory.num_blocks, script.view.memory.num_free) == (2, 0)  # each has its blocks, none is free


def test_what_was_computed_shows_in_the_next_choice() -> None:
    scheduler, script = scripted(Step(r1=4, r2=3))
    enter(scheduler, "r1", 4)
    enter(scheduler, "r2", 9)
    scheduler.choose(0.0)
    scheduler.completed(0.5, 0.25)
    scheduler.choose(0.5)
    assert script.view is not None
    table = script.view.table
    assert (table.num_cached.tolist(), table.num_generated.tolist()) == ([4, 3], [1, 0])
    assert table.first_token_s[0] == 0.5
    assert math.isnan(table.first_token_s[1])
    assert script.view.history.last_s == 0.25


def test_who_is_left_out_gets_no_token_for_the_iteration() -> None:
    scheduler, script = scripted(Step(r2=1))
    enter(scheduler, "r1", 4, num_cached=4, num_generated=1)
    enter(scheduler, "r2", 4, num_cached=4, num_generated=1)
    assert scheduler.choose(0.0) == ((R2, 1),)
    scheduler.completed(0.5, 0.5)
    scheduler.choose(0.5)
    assert script.view is not None
    assert script.view.table.num_generated.tolist() == [1, 2]


def test_who_has_left_or_never_came_is_nothing_to_it() -> None:
    scheduler, script = scripted()
    enter(scheduler, "r1", 4)
    for name in (R1, R1, R2):
        scheduler.leave(name)
        scheduler.set_predicted_length(name, 5.0)
    assert scheduler.choose(0.0) == ()
    assert script.view is not None
    assert len(script.view.table) == 0


def test_a_late_prediction_is_seen() -> None:
    scheduler, script = scripted()
    enter(scheduler, "r1", 4)
    scheduler.set_predicted_length(R1, 5.0)
    scheduler.choose(0.0)
    assert script.view is not None
    assert script.view.table.predicted_len.tolist() == [5.0]


def test_a_policy_that_evicts_here_breaks_an_invariant() -> None:
    scheduler, _ = scripted(Step(r1=1, drop=["r2"]))
    enter(scheduler, "r1", 4)
    enter(scheduler, "r2", 4)
    with pytest.raises(AssertionError, match="evictions on a worker that cannot evict"):
        scheduler.choose(0.0)


def test_everyone_takes_decodes_first_and_prompts_in_order() -> None:
    scheduler = PolicyIterationScheduler(Scheduler(make_policy("aligned"), EasyCosts(), LIMITS))
    enter(scheduler, "r1", 12)
    enter(scheduler, "r2", 4, num_cached=4, num_generated=1)
    assert scheduler.choose(0.0) == ((R2, 1), (R1, 9))
