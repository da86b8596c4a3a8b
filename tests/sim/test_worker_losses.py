"""The loss of a worker, and its return: nothing is lost with it but time."""

import pytest

from alignedserve.config.sections import Topology
from alignedserve.core.errors import ConfigError
from alignedserve.sim.config import SimConfig, SimWorkerLoss
from alignedserve.sim.simulation import Simulation
from tests.harnesses.simulation import colocated, disaggregated, mixed_workload
from tests.support.marks import each

LOAD = mixed_workload(60, 30.0, longest=80, longest_answer=40)
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
