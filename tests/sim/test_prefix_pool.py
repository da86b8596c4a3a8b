"""Simulated nodes with a pool for prefix blocks: the live logics, with copies that take their time."""

from dataclasses import replace

import msgspec

from alignedserve.config.sections import PrefixCacheConfig, Topology
from alignedserve.costmodel.links import LinkModel
from alignedserve.sim.config import SimConfig, SimLinks, SimWorkerLoss
from alignedserve.sim.simulation import Simulation
from alignedserve.workload.requests import TextRun, Workload
from decode_worker.colocated.logic import ColocatedLogic
from tests.harnesses.simulation import BLOCK_BYTES, MESSAGE_S, colocated, timed, workload_of

POOL_BLOCKS = 400
FAST = SimLinks(LinkModel(0.0001, 256_000_000.0), LinkModel(0.0005, 2_560_000.0), MESSAGE_S)
"""A block takes a microsecond to or from the pool."""


def turns(count: int, *, prompt_len: int = 320, output_len: int = 3) -> Workload:
    """Return requests that all begin with the same 300 tokens, two seconds apart."""
    runs = (TextRun("instruction", 300),)
    return workload_of(*(timed(2.0 * number, prompt_len, output_len, runs=runs) for number in range(count)))


def with_pool(config: SimConfig, num_blocks: int = POOL_BLOCKS) -> SimConfig:
    cache = PrefixCacheConfig(host_bytes=num_blocks * BLOCK_BYTES)
    return replace(config, cluster=msgspec.structs.replace(config.cluster, prefix_cache=cache))


def loaded(simulation: Simulation) -> int:
    """Count the tokens whose cache workers have loaded from the pool."""
    logics = [one for one in simulation.logics().values() if isinstance(one, ColocatedLogic)]
    return sum(one._pooled.num_loaded_tokens for one in logics if one._pooled is not None)


def test_a_worker_that_is_back_begins_with_what_the_pool_has() -> None:
    config = replace(colocated(losses=(SimWorkerLoss("worker-0", 3.0, 0.5),)), links=FAST)
    simulation = Simulation(with_pool(config), turns(3))
    result = simulation.run()
    assert result.classes["all"].num_by_ending["completed"] == 3
    assert loaded(simulation) >= 288  # what it loaded before it was lost is forgotten with it


def test_a_link_that_is_slower_than_the_worker_is_left_alone() -> None:
    slow = SimLinks(LinkModel(1.0, 1_000.0), LinkModel(0.0005, 2_560_000.0), MESSAGE_S)
    losses = (SimWorkerLoss("worker-0", 3.0, 0.5),)
    simulation = Simulation(with_pool(replace(colocated(losses=losses), links=slow)), turns(6))
    simulation.run()
    # One load, from which it learns what the next would take.
    assert loaded(simulation) <= 320


def test_requests_of_a_lost_worker_compute_little_again() -> None:
    def longest_s(config: SimConfig) -> float:
        losses = (SimWorkerLoss("worker-0", 2.5, 1000.0),)
        simulation = Simulation(replace(config, losses=losses, links=FAST), turns(4, output_len=60))
        simulation.run()
        return max(record.ended_s - record.arrival_s for record in simulation.records())

    config = colocated(2, policy="aligned_slo", topology=Topology.ELASTIC)
    assert longest_s(with_pool(config)) < longest_s(config)
