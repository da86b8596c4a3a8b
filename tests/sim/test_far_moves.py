"""Elastic workers on two nodes, one of which comes late: what moves there over the network, and what that is worth."""

from dataclasses import replace

import msgspec

from alignedserve.config.sections import RouterConfig, Topology
from alignedserve.core.request import Slo
from alignedserve.costmodel.hardware import LinkModel
from lab.sim.config import SimWorkerLoss
from lab.sim.result import SimulationResult
from lab.sim.simulation import Simulation
from tests.harnesses.simulation import LINKS, colocated, timed, workload_of

LATE = (SimWorkerLoss("worker-1", at_s=0.0, restart_s=3.0),)
LOAD = workload_of(*(timed(0.5 + 0.05 * number, 40, 400, slo=Slo(ttft_s=5.0, tpot_s=0.08)) for number in range(24)))
FAST, SLOW = LinkModel(0.0005, 2_560_000.0), LinkModel(0.5, 1_000.0)


def result_of(network: LinkModel, *, moves_between_nodes: bool = True) -> SimulationResult:
    config = colocated(2, num_pools=2, losses=LATE, policy="aligned_slo", topology=Topology.ELASTIC, worker_blocks=1000)
    router = RouterConfig(moves_between_nodes=moves_between_nodes)
    cluster = msgspec.structs.replace(config.cluster, router=router)
    return Simulation(replace(config, cluster=cluster, links=replace(LINKS, network=network)), LOAD).run()


def test_a_node_that_comes_late_takes_decodes_of_others() -> None:
    alone, moved = result_of(FAST, moves_between_nodes=False), result_of(FAST)
    assert alone.num_handoffs_verified == 0
    assert moved.num_handoffs_verified > 4
    for result in (alone, moved):
        assert result.classes["all"].num_by_ending["completed"] == 24
        assert (result.num_pool_blocks_used, result.num_worker_blocks_used) == (0, 0)
    assert moved.duration_s < 0.9 * alone.duration_s
    assert (moved.classes["all"].tpot_attainment or 0.0) >= (alone.classes["all"].tpot_attainment or 0.0)


def test_a_link_that_is_too_slow_is_tried_once() -> None:
    result = result_of(SLOW)
    assert result.num_handoffs_verified <= 1
    assert result.classes["all"].num_by_ending["completed"] == 24
