"""Workers of two ranks, each on a device of its own: blocks move between equal ranks, and tokens are those of one.

The devices are stand-ins, with memories that nothing else touches and streams in a random order.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.config.sections import BatchingConfig, ClusterConfig, Topology
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.engine import model_executor
from kernels.cpu.rank_exchange import has_rank_exchange
from tests.harnesses.client_gateway import Answer
from tests.support.device_stand_in import HOST, LINK, PCIE, Machine
from tests.support.in_process import RoomCluster, running, small_config
from tests.support.rank_devices import RanksOnDevices, device_of, load_on_devices
from tests.support.waiting import holds

pytestmark = pytest.mark.skipif(not has_rank_exchange(), reason="the native kernels are not built")

SIZE = 2
SAMPLING = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
PREFILL, DECODE = "prefill-0", "decode-0"


@pytest.fixture(autouse=True)
def ranks_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_executor, "load_ranks", load_on_devices)


@pytest.fixture
async def faults_of_the_loop() -> AsyncIterator[list[str]]:
    """Whatever goes wrong in a callback or task would end a real process."""
    faults: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(str(context)))
    yield faults
    assert faults == []


def config_of(folder: Path, *, transport: str = "auto", **changes: object) -> ClusterConfig:
    config = small_config(folder / "model", batching=BatchingConfig(min_requests=4, starvation_s=0.2), **changes)
    engine = replace(config.engine, tensor_parallel=SIZE, device="cuda", kv_transport=transport)
    return replace(config, engine=replace(engine, device="cpu") if transport in ("auto", "shm", "tcp") else engine)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(3, 128) for _ in range(rng.randrange(40, 100))] for _ in range(count)]


async def submitted(cluster: RoomCluster, work: list[list[int]], num_first: int = 4) -> list[Answer]:
    """Submit the first ones, and the others when those run, so that the others are prefetched."""
    first = [cluster.gateway.submit(prompt, SAMPLING) for prompt in work[:num_first]]
    for answer in first:
        await answer.first_token.wait()
    return first + [cluster.gateway.submit(prompt, SAMPLING) for prompt in work[num_first:]]


async def check(cluster: RoomCluster, work: list[list[int]], answers: list[Answer]) -> None:
    async with asyncio.timeout(120):
        for answer in answers:
            await answer.done.wait()
    for prompt, answer in zip(work, answers, strict=True):
        assert answer.failure is None
        assert answer.token_ids == cluster.reference(prompt, SAMPLING)
    await cluster.gateway.idle()


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


@pytest.mark.usefixtures("faults_of_the_loop")
async def test_a_batch_goes_from_each_rank_s_device_to_that_of_its_peer(tmp_path: Path) -> None:
    machine = Machine(1)
    async with running(config_of(tmp_path), tmp_path, machine) as cluster:
        work = prompts(12)
        await check(cluster, work, await submitted(cluster, work))
    ways = [(PCIE, PREFILL, None), (PCIE, None, PREFILL), (LINK, PREFILL, DECODE)]
    for way in ways:
        first, second = moved_bytes(machine, *way)
        assert first == second > 0
    assert {(one.source, one.target) for one in machine.moved(LINK)} <= {
        ends
        for rank in range(SIZE)
        for names in ((PREFILL, DECODE), (DECODE, PREFILL))
        for ends in [tuple(device_of(name, rank) for name in names)]
    }
