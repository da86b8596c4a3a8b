"""Documents beside others that are in less of a hurry: none is later than was promised."""

import pytest

from alignedserve.config.sections import Topology
from alignedserve.core.request import RequestClass, Slo
from lab.sim.simulation import Simulation
from tests.harnesses.simulation import colocated, timed, workload_of

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
