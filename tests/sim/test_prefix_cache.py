"""The prefix cache in simulated clusters: hits on prompts that share texts, and a pool for prefix blocks."""

from dataclasses import replace

import msgspec

from alignedserve.config.sections import PrefixCacheConfig, Topology
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.worker_core.logic import ColocatedLogic
from lab.sim.config import SimConfig, SimLinks, SimWorkerLoss
from lab.sim.result import ClassResult
from lab.sim.simulation import Simulation
from lab.workload.build import build_workload
from lab.workload.catalogue import Library
from lab.workload.requests import TextRun, Workload
from tests.harnesses.simulation import BLOCK_BYTES, LAYOUT, MESSAGE_S, colocated, timed, workload_of
from tests.support.ideal_cache import PromptBlocks, most_hits
from tests.support.marks import each


def without_cache(config: SimConfig) -> SimConfig:
    cluster = msgspec.structs.replace(config.cluster, prefix_cache=PrefixCacheConfig(enabled=False))
    return SimConfig(cluster, config.layout, config.links, config.decode_costs)


def build(line: str, num_requests: int) -> Workload:
    return build_workload(line, seed=0, library=Library(), num_requests=num_requests)


def simulated(config: SimConfig, workload: Workload) -> ClassResult:
    """Simulate; nothing is lost or left behind."""
    result = Simulation(config, workload).run()
    found = result.classes["all"]
    assert found.num_by_ending["completed"] == found.num_sent
    assert result.num_worker_blocks_used == 0
    return found


def test_a_conversation_finds_every_full_block_of_what_was_said() -> None:
    chat = build("prompt=20, output=30, turns=4, instruction=100, rate=1, think=1", 1)
    found = simulated(colocated(), chat)
    prompts, first_repeat = [120, 120 + 29 + 20, 169 + 49, 218 + 49], 120
    computed = [length + 29 for length in prompts[:-1]]  # with the answer, but its last token
    assert prompts[0] == first_repeat
    assert found.num_prompt_tokens == sum(prompts)
    assert found.num_cached_tokens == sum(length // 16 * 16 for length in computed)


def test_an_answer_that_is_not_repeated_is_not_found() -> None:
    found = simulated(colocated(), build("prompt=20, output=30, instruction=100, rate=0.1, cv=0", 3))
    assert found.num_cached_tokens == 2 * 96


def test_it_makes_first_tokens_sooner_and_can_be_switched_off() -> None:
    chat = build("prompt=20, output=10, turns=4, instruction=1000, rate=0.5, think=1", 6)
    config = colocated(2)
    cached, computed = simulated(config, chat), simulated(without_cache(config), chat)
    assert computed.num_cached_tokens == 0
    assert (cached.hit_rate or 0.0) > 0.8
    assert cached.ttft_s is not None
    assert computed.ttft_s is not None
    assert cached.ttft_s.distribution.mean < computed.ttft_s.distribution.mean


def test_requests_without_texts_share_nothing() -> None:
    assert simulated(colocated(), build("prompt=100, output=5, rate=1", 10)).num_cached_tokens == 0


@each(
    "config",
    [
        colocated(2, worker_blocks=60),
        colocated(3, topology=Topology.ELASTIC, policy="aligned_slo", worker_blocks=80),
        colocated(2, worker_blocks=60, losses=(SimWorkerLoss("worker-0", 3.0, 1.0),)),
    ],
)
def test_no_run_hits_more_than_an_ideal_cache(config: SimConfig) -> None:
    lines = build("prompt=40, output=8, instruction=uniform(100,400), instructions=5, rate=4", 40)
    found = simulated(config, lines)
    blocks = PromptBlocks(LAYOUT.block_size)
    most = most_hits([blocks.of(one.runs, one.prompt_len) for one in lines.requests]) * LAYOUT.block_size
    num_begun_again = 2 * 440 if config.losses else 0  # resumed requests may find their own blocks
    assert 0 < found.num_cached_tokens <= most + num_begun_again


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
