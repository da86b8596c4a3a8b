"""Plans of a policy from another package: followed where a worker can, refused with what is wrong where it cannot."""

from typing import Any

import pytest

from alignedserve.core.errors import PolicyError
from alignedserve.scheduling.checked_policy import CheckedPolicy
from alignedserve.scheduling.policies import policy_entry
from alignedserve.scheduling.policy import EvictionMode, IterationPlan, PlannedEviction, ScheduledRequest, WorkerView
from tests.harnesses.scheduling import view_of
from tests.support.marks import each

ROWS = {"prompt": {"prompt_len": 40}, "decode": {"prompt_len": 30, "num_generated": 3}}  # its 33rd token takes a block
DROP = PlannedEviction(1, EvictionMode.DROP)


class Planned:
    def __init__(self, plan: IterationPlan) -> None:
        self._plan = plan

    def plan(self, view: WorkerView) -> IterationPlan:
        return self._plan


def scheduled(*parts: tuple[int, int], **more: object) -> IterationPlan:
    return IterationPlan(tuple(ScheduledRequest(*part) for part in parts), **more)  # type: ignore[arg-type]


@each("plan", [scheduled((0, 40)), scheduled((1, 1)), scheduled((0, 40), evictions=(DROP,)), scheduled()])
def test_a_plan_that_fits_is_followed(plan: IterationPlan) -> None:
    assert CheckedPolicy("mine", Planned(plan)).plan(view_of(ROWS, num_blocks=5)) is plan


@each(
    ("plan", "reason"),
    [
        (scheduled((0, 40), (1, 1)), "more blocks than are free (3 before its evictions)"),
        (scheduled((0, 41)), "41 tokens of a request that has 40 to compute"),
        (scheduled((1, 0)), "0 tokens of a request that has 1 to compute"),
        (scheduled((2, 1)), "row 2, and there are 2 requests"),
        (scheduled((-1, 1)), "row -1, and there are 2 requests"),
        (scheduled((1, 1), (1, 1)), "one request twice"),
        (scheduled((0, 40), evictions=(DROP, DROP)), "one request twice"),
        (scheduled((1, 1), evictions=(DROP._replace(row=0),)), "an eviction of a request without a cache here"),
    ],
)
def test_a_plan_beyond_memory_or_requests_is_refused(plan: IterationPlan, reason: str) -> None:
    with pytest.raises(PolicyError) as refused:
        CheckedPolicy("mine", Planned(plan)).plan(view_of(ROWS, num_blocks=5))
    assert str(refused.value) == f"policy 'mine' planned {reason}"


@each(
    ("limit", "reason"),
    [
        ({"max_tokens": 40}, "more than 40 tokens in one iteration"),
        ({"max_running_requests": 1}, "more than 1 requests in one iteration"),
    ],
)
def test_a_plan_beyond_limits_is_refused(limit: dict[str, Any], reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        CheckedPolicy("mine", Planned(scheduled((0, 40), (1, 1)))).plan(view_of(ROWS, num_blocks=50, **limit))


@each("name", ["sarathi", "qoserve", "fcfs_classed"])
def test_baselines_of_the_laboratory_plan_what_can_be_done(name: str) -> None:
    entry = policy_entry(name)
    policy = CheckedPolicy(name, entry.make(entry.config()))
    assert policy.plan(view_of(ROWS, num_blocks=5)).scheduled
