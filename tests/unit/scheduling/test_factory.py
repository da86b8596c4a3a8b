"""Schedulers built from the configuration."""

import pytest

from alignedserve.config.sections import BatchingConfig, ClusterConfig, RouterConfig, SchedulingConfig, Topology
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.online import OnlineIterationModel
from alignedserve.scheduling.factory import (
    make_decode_scheduler,
    make_iteration_scheduler,
    make_scheduler,
    resolve_policy,
)
from alignedserve.scheduling.iteration_scheduler import FcfsIterationScheduler, PolicyIterationScheduler
from alignedserve.scheduling.policies.round_robin import RoundRobin
from alignedserve.scheduling.policy import IterationLimits
from alignedserve.scheduling.scheduler_state import Scheduler
from tests.harnesses.scheduling import EasyCosts
from tests.support.marks import each

LIMITS = IterationLimits(max_running_requests=4, max_tokens=10)


def test_known_costs_are_not_learned() -> None:
    costs = EasyCosts()
    scheduler = make_scheduler(SchedulingConfig(policy="round_robin"), LIMITS, costs)
    assert isinstance(scheduler.policy, RoundRobin)
    assert (scheduler.costs, scheduler.learner, scheduler.limits) == (costs, None, LIMITS)


def test_unknown_costs_are_learned_from_what_runs() -> None:
    scheduler = make_scheduler(SchedulingConfig(), LIMITS)
    assert isinstance(scheduler.learner, OnlineIterationModel)
    assert scheduler.costs is scheduler.learner


def test_workers_share_neither_policy_nor_costs() -> None:
    one, other = (make_scheduler(SchedulingConfig(), LIMITS) for _ in range(2))
    assert one.policy is not other.policy
    assert one.costs is not other.costs


@each(
    ("scheduling", "message"),
    [
        (SchedulingConfig(policy="lifo"), "lifo"),
        (SchedulingConfig(policy="fcfs", policy_params={"colour": "red"}), "colour"),
    ],
)
def test_what_does_not_exist_is_named(scheduling: SchedulingConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scheduler(scheduling, LIMITS)
    with pytest.raises(ConfigError, match=message):
        resolve_policy(ClusterConfig(scheduling=scheduling))


def test_a_policy_that_paces_decides_on_both_kinds_of_workers() -> None:
    paced = SchedulingConfig(policy="round_robin")
    assert isinstance(make_iteration_scheduler(paced, LIMITS), PolicyIterationScheduler)
    assert isinstance(make_decode_scheduler(paced, LIMITS), Scheduler)


def test_without_pacing_prompts_go_in_order_and_decodes_all_together() -> None:
    other = SchedulingConfig(policy="aligned")
    assert isinstance(make_iteration_scheduler(other, LIMITS), FcfsIterationScheduler)
    assert make_decode_scheduler(other, LIMITS) is None


def test_what_a_policy_implies_is_set() -> None:
    resolved = resolve_policy(ClusterConfig(scheduling=SchedulingConfig(policy="distserve")))
    assert (resolved.router.prefill_order, resolved.router.direct_handoff) == ("fcfs", True)
    assert resolved.batching.policy == "fcfs"


def test_what_is_set_explicitly_stays() -> None:
    config = ClusterConfig(
        topology=Topology.DISAGGREGATED,
        scheduling=SchedulingConfig(policy="distserve"),
        router=RouterConfig(prefill_order="least_slack", direct_handoff=False),
        batching=BatchingConfig(policy="density_first"),
    )
    assert resolve_policy(config) == config


def test_settings_of_the_batching_section_go_there() -> None:
    config = ClusterConfig(scheduling=SchedulingConfig(policy="aligned", policy_params={"min_requests": 7}))
    resolved = resolve_policy(config)
    assert (resolved.batching.policy, resolved.batching.min_requests) == ("density_first", 7)
    assert resolved.batching.starvation_s == config.batching.starvation_s


def test_to_resolve_twice_changes_nothing() -> None:
    once = resolve_policy(ClusterConfig())
    assert resolve_policy(once) == once
