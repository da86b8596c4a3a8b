"""Slack packed, simulated: separate workers hold a TPOT that they break by taking all for which memory has room."""

from dataclasses import replace
from typing import Any

import msgspec

from alignedserve.config.sections import BatchingConfig, RouterConfig, SchedulingConfig
from alignedserve.core.request import RequestClass, Slo
from alignedserve.scheduling.factory import resolve_policy
from lab.sim.result import ClassResult
from lab.sim.simulation import Simulation
from lab.workload.requests import Workload
from tests.harnesses.scheduling import EasyCosts
from tests.harnesses.simulation import disaggregated, timed, workload_of

TPOT_S = 0.04  # an iteration of fifteen requests of a hundred tokens; a worker runs up to 32
PACKED, APART = {"pack_share": 0.9}, {"pack_share": None}


def classes(policy: str, params: dict[str, Any], workload: Workload) -> dict[str, ClassResult]:
    config = disaggregated(1, 2, prefill_costs=EasyCosts(token_s=0.00001))
    cluster = msgspec.structs.replace(
        config.cluster,
        scheduling=SchedulingConfig(policy=policy, policy_params=params),
        router=RouterConfig(),
        batching=BatchingConfig(min_requests=8),
    )
    return Simulation(replace(config, cluster=resolve_policy(cluster)), workload).run().classes


def chats(count: int, **changes: Any) -> Workload:
    """Return chats of many lengths, twenty in a second: twice as many as are served within the objective."""
    slo = Slo(tpot_s=TPOT_S)
    return workload_of(
        *(timed(0.05 * number, 20 + 37 * number % 160, 60, slo=slo, **changes) for number in range(count))
    )


def test_a_tpot_is_held_by_more_than_without_and_everybody_is_served() -> None:
    held = {}
    for name, policy, params in (
        ("packed", "aligned", PACKED),
        ("apart", "aligned", APART),
        ("direct", "distserve", {}),
    ):
        of = classes(policy, params, chats(100))["chat"]
        assert of.num_by_ending["completed"] == 100
        held[name] = of.tpot_attainment or 0.0
    assert held["packed"] >= 0.9
    assert max(held["apart"], held["direct"]) <= held["packed"] - 0.3


def test_beside_documents_more_gaps_of_chat_are_held_than_without_and_these_end_as_well() -> None:
    documents: dict[str, Any] = {"class_name": "documents", "request_class": RequestClass.BEST_EFFORT}
    chat = chats(60).requests
    more = [timed(0.0, 100, 60, slo=Slo(), **documents) for _ in range(40)]
    both = workload_of(*sorted([*chat, *more], key=lambda one: one.arrival_s))
    packed, apart, direct = (
        classes(policy, params, both) for policy, params in (("aligned", PACKED), ("aligned", APART), ("distserve", {}))
    )
    assert packed["documents"].num_by_ending["completed"] == 40
    without = max(apart["chat"].tpot_attainment or 0.0, direct["chat"].tpot_attainment or 0.0)
    assert (packed["chat"].tpot_attainment or 0.0) >= without + 0.3
