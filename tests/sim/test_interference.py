"""The bound on interference, simulated in every topology: chat's gaps beside documents, and what documents get."""

from dataclasses import replace

import msgspec
import pytest

from alignedserve.config.sections import RouterConfig, SchedulingConfig
from lab.sim.result import ClassResult
from lab.sim.simulation import Simulation
from tests.sim.test_chat_beside_documents import DURATION_S, TOPOLOGIES, beside


def _run(name: str, num_documents: int, bound: float | None) -> dict[str, ClassResult]:
    config, router = TOPOLOGIES[name], RouterConfig(prefill_order="least_slack")
    scheduling = SchedulingConfig(policy="aligned_slo", interference=bound)
    cluster = msgspec.structs.replace(config.cluster, scheduling=scheduling, router=router)
    return Simulation(replace(config, cluster=cluster, duration_s=DURATION_S), beside(num_documents)).run().classes


def _tpot_s(result: ClassResult, percent: int) -> float:
    assert result.tpot_s is not None
    return result.tpot_s.curve[percent]


@pytest.mark.parametrize("name", ["elastic", "colocated", "disaggregated"])
def test_gaps_beside_documents_are_those_without_within_the_bound(name: str) -> None:
    alone = _run(name, 0, None)["chat"]
    unbound, bound = _run(name, 150, None), _run(name, 150, 1.1)
    assert _tpot_s(unbound["chat"], 50) > 2 * _tpot_s(alone, 50)  # there is something to bound
    assert _tpot_s(bound["chat"], 50) <= 1.15 * _tpot_s(alone, 50)
    assert _tpot_s(bound["chat"], 99) <= 1.3 * _tpot_s(alone, 99)  # of four dozen: which prompts meet is chance
    assert bound["chat"].attainment == 1.0
    assert bound["documents"].tokens_per_s > 0.4 * unbound["documents"].tokens_per_s
