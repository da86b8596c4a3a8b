"""Baselines that know classes, simulated: a backlog of documents costs chat nothing; those that know none lose it."""

from dataclasses import replace

import msgspec
import pytest

from alignedserve.config.sections import BatchingConfig, RouterConfig, SchedulingConfig
from alignedserve.scheduling.factory import resolve_policy
from alignedserve.scheduling.policies import policy_entry
from lab.sim.result import ClassResult
from lab.sim.simulation import Simulation
from tests.sim.test_chat_beside_documents import DURATION_S, TOPOLOGIES, beside

CLASSED: dict[str, dict[str, int]] = {
    "fcfs_classed": {},
    "sarathi_classed": {"token_budget": 128},
    "edf": {"token_budget": 128},
    "srpt": {"token_budget": 128},
    "qoserve": {"token_budget": 128, "least_tokens": 64},
}
CASES = [
    (policy, name)
    for policy in CLASSED
    for name in ("colocated", "disaggregated")
    if TOPOLOGIES[name].cluster.topology in policy_entry(policy).topologies
]


def _classes(policy: str, name: str, num_documents: int) -> dict[str, ClassResult]:
    config = TOPOLOGIES[name]
    scheduling = SchedulingConfig(policy=policy, policy_params=CLASSED.get(policy, {}))
    cluster = msgspec.structs.replace(
        config.cluster, scheduling=scheduling, router=RouterConfig(), batching=BatchingConfig()
    )
    config = replace(config, cluster=resolve_policy(cluster), duration_s=DURATION_S)
    return Simulation(config, beside(num_documents)).run().classes


@pytest.mark.parametrize(("policy", "name"), CASES)
def test_chat_keeps_its_objectives_beside_documents(policy: str, name: str) -> None:
    beside = _classes(policy, name, 150)
    chat, documents = beside["chat"], beside["documents"]
    assert chat.attainment is not None
    assert chat.attainment >= (0.95 if policy == "fcfs_classed" else 1.0)  # whose prompts are whole
    assert documents.tokens_per_s > 100.0


@pytest.mark.parametrize("policy", ["fcfs", "sarathi"])
def test_without_classes_it_does_not(policy: str) -> None:
    assert _classes(policy, "colocated", 150)["chat"].attainment == 0.0
