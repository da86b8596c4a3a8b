"""Every router that was tried serves all requests, and the benchmarks of moves and placements compare what they say."""

import pytest

from alignedserve.config.sections import Topology
from alignedserve.sim.result import ALL
from alignedserve.sim.sweep import WorkloadLine
from benchmarks.simulation.placement_trials import summary_of
from benchmarks.simulation.trial_routers import ROUTERS, RoutedSimulation
from benchmarks.support.server_cluster import server_cluster

pytestmark = pytest.mark.slow
LINE = (
    "rt: prompt=uniform(100,4000), output=uniform(20,60), rate=8, ttft=1, tpot=0.05; "
    "be: prompt=uniform(100,400), output=30, outstanding=4"
)


@pytest.mark.parametrize("name", ROUTERS)
def test_all_requests_end(name: str) -> None:
    config = server_cluster("aligned_slo", Topology.ELASTIC, 3)
    result = RoutedSimulation(config, WorkloadLine(LINE, duration_s=3.0).build(), ROUTERS[name]).run()
    assert result.classes["rt"].num_by_ending["completed"] == result.classes["rt"].num_sent
    assert result.classes[ALL].num_sent > 20
    assert (name == "no moves") <= (result.num_handoffs_verified == 0)


def test_gains_are_those_over_the_router_as_it_is() -> None:
    rows = [
        {"router": "as it is", "trace": "code", "gained": 0.0},
        {"router": "late binding", "trace": "code", "gained": -1.0},
        {"router": "late binding", "trace": "arXiv", "gained": 2.0},
    ]
    gained = {"mean": 0.5, "least": -1.0, "most": 2.0, "code": -1.0, "arXiv": 2.0}
    assert summary_of(rows) == {"late binding": gained}
