"""Slack packed, simulated: separate workers hold a TPOT that they break by taking all for which memory has room."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from alignedserve.config.sections import BatchingConfig, RouterConfig, SchedulingConfig, Topology
from alignedserve.core.request import RequestClass, Slo
from alignedserve.scheduling.factory import resolve_policy
from lab.sim.result import ClassResult
from lab.sim.simulation import Simulation
from lab.workload.requests import Workload
from tests.harnesses.scheduling import EasyCosts
from tests.harnesses.simulation import colocated, disaggregated, timed, workload_of

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


TOPOLOGIES = {
    "elastic": colocated(policy="aligned_slo", topology=Topology.ELASTIC),
    "colocated": colocated(policy="aligned_slo"),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_documents_whose_window_ends_soon_do_not_decode_at_the_pace_of_all(name: str) -> None:
    """All 32 together take 12 s, the ten whose window is of 7 s alone 5: those were 5 s late."""
    requests = [
        timed(0.0, 30, 150, class_name=window, request_class=RequestClass.BEST_EFFORT, slo=Slo(deadline_s=deadline_s))
        for window, deadline_s, count in (("an hour", 3600.0, 22), ("seven seconds", 7.0, 10))
        for _ in range(count)
    ]
    classes = Simulation(TOPOLOGIES[name], workload_of(*requests)).run().classes
    assert classes["seven seconds"].attainment == 1.0
    assert classes["an hour"].attainment == 1.0
