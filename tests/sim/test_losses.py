"""Routers whose decisions take time, several of them; the loss of a router, and of a worker."""

import pytest

from alignedserve.config.sections import Topology
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import RequestId
from alignedserve.messages.gateways import ClusterStatus
from lab.sim.config import SimConfig, SimRouters, SimWorkerLoss
from lab.sim.result import SimulationResult
from lab.sim.routers import RouterChoice
from lab.sim.simulation import Simulation
from tests.harnesses.simulation import colocated, disaggregated, mixed_workload, timed, workload_of
from tests.support.marks import each

LOAD = mixed_workload(60, 30.0, longest=80, longest_answer=40)


def run(routers: SimRouters, num_nodes: int = 4) -> SimulationResult:
    return Simulation(disaggregated(num_nodes, num_nodes, num_pools=num_nodes, routers=routers), LOAD).run()


def test_the_first_token_waits_for_the_routers_decision() -> None:
    def ttft_s(event_s: float) -> float:
        routers = SimRouters(event_s=event_s)
        measure = Simulation(disaggregated(routers=routers), workload_of(timed())).run().classes["all"].ttft_s
        assert measure is not None
        return measure.distribution.max

    assert ttft_s(0.002) == pytest.approx(ttft_s(0.0) + 0.002)


def test_a_router_that_is_too_slow_falls_behind() -> None:
    fast, slow = (run(SimRouters(event_s=event_s)).routers[0] for event_s in (0.0, 0.01))
    assert (fast.utilisation, fast.max_behind_s) == (0.0, 0.0)
    assert 0.95 < slow.utilisation <= 1.0
    assert slow.max_behind_s > 0.5


@each("lost_at_s", [None, 0.0, 0.5])
def test_no_router_is_busy_for_longer_than_the_run(lost_at_s: float | None) -> None:
    routers = SimRouters(event_s=0.02, lost_at_s=lost_at_s, restart_s=0.5)
    assert 0.5 < run(routers).routers[0].utilisation <= 1.0


@each("count", [1, 2, 4])
def test_several_routers_serve_all_requests(count: int) -> None:
    result = run(SimRouters(count=count))
    assert result.classes["all"].num_by_ending["completed"] == 60
    assert [router.num_events > 0 for router in result.routers] == [True] * count
    assert (result.num_pool_blocks_used, result.num_worker_blocks_used) == (0, 0)


@each("count", [1, 3])
def test_no_request_ends_with_its_router(count: int) -> None:
    result = run(SimRouters(count=count, lost_at_s=0.7, restart_s=0.3))
    assert result.classes["all"].num_by_ending["completed"] == 60
    assert (result.num_pool_blocks_used, result.num_worker_blocks_used) == (0, 0)


def test_impossible_routers_are_refused() -> None:
    with pytest.raises(ConfigError, match="lost_at_s"):
        SimRouters(lost_at_s=-1.0)
    with pytest.raises(ConfigError, match="between 1 and 2"):
        disaggregated(2, 2, num_pools=2, routers=SimRouters(count=3))


# --- the choice of a router

NAMES = [f"router-{number}" for number in range(4)]


def test_requests_are_spread_over_all_routers() -> None:
    choice = RouterChoice(NAMES)
    chosen = [choice.choose(RequestId(f"r{number}")) for number in range(4000)]
    assert all(900 < chosen.count(name) < 1100 for name in NAMES)


def test_the_busiest_router_gets_nothing_and_a_lost_one_neither() -> None:
    choice = RouterChoice(NAMES)
    choice.observe("router-1", ClusterStatus(num_decoding=9))
    choice.set_lost("router-2", is_lost=True)
    chosen = {choice.choose(RequestId(f"r{number}")) for number in range(100)}
    assert chosen == {"router-0", "router-3"}
    choice.set_lost("router-2", is_lost=False)
    assert "router-2" in {choice.choose(RequestId(f"r{number}")) for number in range(100)}


def test_while_all_are_lost_one_is_chosen_that_may_come_back() -> None:
    choice = RouterChoice(["router"])
    choice.set_lost("router", is_lost=True)
    assert choice.choose(RequestId("r1")) == "router"


WORKER = SimWorkerLoss("worker-0", 0.7, 0.5)
DECODER, PREFILLER = SimWorkerLoss("decode-0", 0.7, 0.5), SimWorkerLoss("prefill-1", 0.7, 0.5)


@each(
    "config",
    [
        colocated(2, losses=(WORKER,)),
        colocated(
            3,
            policy="aligned_slo",
            topology=Topology.ELASTIC,
            max_running_requests=8,
            losses=(WORKER, SimWorkerLoss("worker-1", 0.9, 0.5)),
        ),
        disaggregated(2, 2, losses=(DECODER, PREFILLER)),
    ],
)
def test_no_request_ends_with_its_worker(config: SimConfig) -> None:
    result = Simulation(config, LOAD).run()
    assert result.classes["all"].num_by_ending["completed"] == 60
    assert (result.num_pool_blocks_used, result.num_worker_blocks_used) == (0, 0)


def test_a_worker_that_is_back_works_again() -> None:
    def decoded_by(restart_s: float) -> int:
        config = colocated(2, losses=(SimWorkerLoss("worker-0", 0.2, restart_s),))
        return Simulation(config, LOAD).run().workers[0].num_decodes

    assert decoded_by(0.3) > 2 * decoded_by(1000.0) > 0


def test_the_others_answer_at_once() -> None:
    simulation = Simulation(colocated(2, losses=(SimWorkerLoss("worker-0", 0.7, 1000.0),)), LOAD)
    assert simulation.run().duration_s < 30.0
    lengths = {record.number: record.num_tokens for record in simulation.records()}
    assert lengths == {number: timed.output_len for number, timed in enumerate(LOAD.requests)}


def test_impossible_losses_are_refused() -> None:
    with pytest.raises(ConfigError, match="restart_s"):
        SimWorkerLoss("worker-0", 1.0, 0.0)
    with pytest.raises(ConfigError, match="worker-9"):
        Simulation(colocated(2, losses=(SimWorkerLoss("worker-9", 1.0),)), LOAD)
    with pytest.raises(ConfigError, match="twice"):
        Simulation(colocated(2, losses=(WORKER, WORKER)), LOAD)
