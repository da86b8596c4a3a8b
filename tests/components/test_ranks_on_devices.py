"""Workers of two ranks, each on a device of its own: blocks move through host memory, and tokens are those of one.

The devices are stand-ins, with memories that nothing else touches and streams in a random order.
"""

from dataclasses import replace as changed
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.config.sections import BatchingConfig, ClusterConfig, Topology
from alignedserve.core.request import SamplingParams, Slo
from alignedserve.runtime.engine import worker_engine
from alignedserve.runtime.engine.ranks import rank_group
from kernels.cpu.rank_exchange import has_rank_exchange
from tests.components.work import check, prompts, submitted
from tests.harnesses.clusters.in_process import running, small_config
from tests.harnesses.clusters.two_nodes import FAR, start_two_nodes
from tests.support.devices.device_stand_in import HOST, LINK, PCIE, Machine
from tests.support.devices.rank_devices import RanksOnDevices, device_of, load_on_devices
from tests.support.waiting import holds

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_rank_exchange(), reason="the native kernels are not built")]

SIZE = 2
SAMPLING = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
LONGER = changed(SAMPLING, max_tokens=200)
TOO_TIGHT = Slo(tpot_s=1e-6)  # its decodes leave a worker no time for prompts
PREFILL, DECODE = "prefill-0", "decode-0"


@pytest.fixture(autouse=True)
def ranks_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_engine, "load_ranks", load_on_devices)


def config_of(folder: Path, *, topology: Topology = Topology.DISAGGREGATED) -> ClusterConfig:
    batching = BatchingConfig(min_requests=4, starvation_s=0.2)
    config = small_config(folder / "model", batching=batching, topology=topology)
    engine = replace(config.engine, tensor_parallel=SIZE)
    return replace(config, engine=engine, router=replace(config.router, max_retries=20))


def moved_bytes(machine: Machine, way: str, source: str | None, target: str | None) -> list[int]:
    """Return what each rank moved between these workers; None: the host."""
    return [
        sum(
            copy.num_bytes
            for copy in machine.moved(
                way,
                HOST if source is None else device_of(source, rank),
                HOST if target is None else device_of(target, rank),
            )
        )
        for rank in range(SIZE)
    ]


async def test_candidate_buffers_in_host_memory_are_filled_and_read_by_every_rank(tmp_path: Path) -> None:
    machine = Machine(2)
    async with running(config_of(tmp_path), tmp_path, machine) as cluster:
        work = prompts(12, 40, 100)
        await check(cluster, work, await submitted(cluster, work, SAMPLING), SAMPLING)
        status = await cluster.gateway.idle()
    first, second = moved_bytes(machine, PCIE, None, DECODE)
    assert machine.moved(LINK) == []
    assert first == second > 0
    assert status.num_handoffs_verified > 0
    assert status.num_handoffs_refused == 0


async def test_every_rank_reads_its_parts_from_the_pool_of_another_node(tmp_path: Path) -> None:
    machine = Machine(5)
    cluster = await start_two_nodes(config_of(tmp_path), tmp_path, has_tls=True, machine=machine)
    try:
        work = prompts(6, 40, 100)
        await check(cluster, work, [cluster.gateway.submit(prompt, SAMPLING) for prompt in work], SAMPLING)
        status = await cluster.gateway.idle()
    finally:
        await cluster.close()
    first, second = moved_bytes(machine, PCIE, None, FAR)
    assert first == second > 0
    assert status.num_handoffs_refused == 0


@pytest.fixture
def ranks_as_processes(ranks_on_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks as processes, each with a memory of its own, on the host."""
    monkeypatch.undo()  # the ranks of threads
    monkeypatch.setattr(rank_group, "make_block_memory", lambda _: None)


@pytest.mark.usefixtures("ranks_as_processes")
async def test_a_killed_process_of_a_rank_is_its_worker_s_death(tmp_path: Path, faults_of_the_loop: list[str]) -> None:
    async with running(config_of(tmp_path), tmp_path) as cluster:
        work = prompts(8, 40, 100)
        answers = await submitted(cluster, work, SAMPLING)
        ranks = cluster.engines[PREFILL]._ranks
        assert isinstance(ranks, rank_group.RankGroup)
        ranks._followers[0].process.kill()
        await holds(lambda: faults_of_the_loop != [])  # which ends a real process
        await cluster.stop(PREFILL)
        await cluster.start_prefill(PREFILL)
        await check(cluster, work, answers, SAMPLING)
    faults_of_the_loop.clear()


async def test_requests_move_between_elastic_workers(tmp_path: Path) -> None:
    machine = Machine(3)
    config = config_of(tmp_path, topology=Topology.ELASTIC)
    async with running(config, tmp_path, machine) as cluster:
        work = [[5 + number, 6, 7, 8 + number] for number in range(3)]
        answers = [cluster.gateway.submit(prompt, LONGER, TOO_TIGHT) for prompt in work]
        await answers[0].first_token.wait()
        await cluster.start_decode("decode-1")
        await check(cluster, work, answers, LONGER)
        status = await cluster.gateway.idle()
    assert status.num_handoffs_verified > 0
    assert status.num_handoffs_refused == 0


async def test_a_rank_lost_among_moves_is_its_worker_s_death_and_requests_go_on_elsewhere(
    tmp_path: Path, faults_of_the_loop: list[str]
) -> None:
    worker = DECODE
    machine = Machine(4)
    config = config_of(tmp_path)
    config = replace(config, prefill=replace(config.prefill, count=2), decode=replace(config.decode, count=2))
    async with running(config, tmp_path, machine) as cluster:
        work = prompts(16, 40, 100)
        answers = await submitted(cluster, work, SAMPLING, 8)
        await holds(lambda: machine.moved(PCIE, HOST, device_of(worker, 1)) != [])
        ranks = cluster.engines[worker]._ranks
        assert isinstance(ranks, RanksOnDevices)
        ranks.lose(1)
        await holds(lambda: faults_of_the_loop != [])  # which ends a real process
        await cluster.stop(worker)
        await cluster.start_decode(worker)
        await check(cluster, work, answers, SAMPLING)
    assert all("a rank of this worker has ended" in fault for fault in faults_of_the_loop)
    faults_of_the_loop.clear()
