"""Rooms that go and come back in the middle of answers: every answer is the undisturbed one, and nothing leaks."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.config.sections import ClusterConfig, RouterConfig, Topology
from alignedserve.core.request import FinishReason, SamplingParams
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.runtime.kv.shm_arena import Arena
from tests.harnesses.client_gateway import Answer
from tests.support.in_process import RoomCluster, running, small_config
from tests.support.marks import slow
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

# Long enough that all are in the middle of it when something happens.
SAMPLING = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 128) for _ in range(rng.randrange(2, 60))] for _ in range(count)]


@pytest.fixture(autouse=True)
async def faults_of_the_loop() -> AsyncIterator[list[str]]:
    """Whatever goes wrong in a callback or task would end a real process."""
    faults: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(str(context)))
    yield faults
    assert faults == []


class Load:
    """Requests in flight on a cluster."""

    def __init__(self, cluster: RoomCluster, count: int = 6, sampling: SamplingParams = SAMPLING) -> None:
        self.cluster = cluster
        self.sampling = sampling
        self.prompts = prompts(count)
        self.answers: list[Answer] = [cluster.gateway.submit(prompt, sampling) for prompt in self.prompts]

    async def until_tokens(self, count: int) -> None:
        """Wait until every answer has this many tokens."""
        await holds(lambda: all(len(answer.token_ids) >= count for answer in self.answers))

    async def check(self) -> ClusterStatus:
        """Wait for all answers; each must be right, whole and without a gap, and nothing may be held after it."""
        async with asyncio.timeout(40):
            for answer in self.answers:
                await answer.done.wait()
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            assert answer.failure is None
            assert answer.token_ids == self.cluster.reference(prompt, self.sampling)
            assert answer.finish_reason is FinishReason.LENGTH
        return await self.cluster.gateway.idle()


def two_of_each(folder: Path) -> ClusterConfig:
    config = small_config(folder)
    return replace(config, prefill=replace(config.prefill, count=2), decode=replace(config.decode, count=2))


Starter = Callable[[RoomCluster], Awaitable[None]]
STARTERS: dict[str, Starter] = {
    "decode-0": lambda cluster: cluster.start_decode("decode-0"),
    "prefill-0": lambda cluster: cluster.start_prefill("prefill-0"),
    "pool-0": lambda cluster: cluster.start_pool(),
    "router": lambda cluster: cluster.start_router(),
}


@pytest.mark.parametrize("name", STARTERS)
async def test_a_room_is_lost_and_comes_back_mid_answer(name: str, tmp_path: Path) -> None:
    async with running(small_config(tmp_path / "model"), tmp_path) as cluster:
        load = Load(cluster)
        await load.until_tokens(5)
        await cluster.stop(name)
        await asyncio.sleep(0.05)
        await STARTERS[name](cluster)
        await load.check()


@pytest.mark.parametrize("name", ["prefill-0", "router", *slow("decode-0", "pool-0")])
async def test_a_room_is_lost_and_comes_back_before_the_first_token(name: str, tmp_path: Path) -> None:
    async with running(small_config(tmp_path / "model"), tmp_path) as cluster:
        load = Load(cluster)
        await asyncio.sleep(0)
        await cluster.stop(name)
        await STARTERS[name](cluster)
        await load.check()


@pytest.mark.parametrize("name", ["decode-0", "router"])
async def test_a_colocated_room_is_lost_and_comes_back(name: str, tmp_path: Path) -> None:
    config = small_config(tmp_path / "model", topology=Topology.COLOCATED)
    async with running(config, tmp_path) as cluster:
        load = Load(cluster)
        await load.until_tokens(5)
        await cluster.stop(name)
        await STARTERS[name](cluster)
        await load.check()


@pytest.mark.parametrize("name", ["decode-0", *slow("prefill-0")])
async def test_another_worker_goes_on(name: str, tmp_path: Path) -> None:
    async with running(two_of_each(tmp_path / "model"), tmp_path) as cluster:
        load = Load(cluster, count=8)
        await load.until_tokens(3)
        await cluster.stop(name)
        await load.check()


@pytest.mark.parametrize("topology", [Topology.COLOCATED, Topology.ELASTIC])
async def test_a_standby_has_no_work_until_it_takes_over(topology: Topology, tmp_path: Path) -> None:
    config = small_config(tmp_path / "model", topology=topology)
    config = replace(config, decode=replace(config.decode, count=1, standby=1))
    async with running(config, tmp_path) as cluster:
        await cluster.start_decode("decode-1")
        load = Load(cluster)
        await load.until_tokens(5)
        assert cluster.engines["decode-1"].num_computed == 0
        await cluster.stop("decode-0")
        await load.check()
        await cluster.start_decode("decode-0")
        await Load(cluster).check()
        assert cluster.engines["decode-0"].num_computed == 0  # it stands by in its turn


async def test_everything_goes_one_after_another(tmp_path: Path) -> None:
    config = small_config(tmp_path / "model", router=RouterConfig(max_retries=20))
    async with running(config, tmp_path) as cluster:
        load = Load(cluster, count=4)
        for number, name in enumerate(("decode-0", "pool-0", "prefill-0", "router", "decode-0"), 1):
            await load.until_tokens(4 * number)
            await cluster.stop(name)
            await STARTERS[name](cluster)
        await load.check()


async def test_seeded_sampling_goes_on_with_the_same_draws(tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True)
    async with running(small_config(tmp_path / "model"), tmp_path) as cluster:
        load = Load(cluster, count=3, sampling=sampling)
        await load.until_tokens(7)
        await cluster.stop("decode-0")
        await cluster.start_decode("decode-0")
        await load.check()


async def test_aborts_while_the_decode_worker_is_away_leave_nothing(tmp_path: Path) -> None:
    async with running(small_config(tmp_path / "model"), tmp_path) as cluster:
        load = Load(cluster)
        await load.until_tokens(2)
        await cluster.stop("decode-0")
        still_open = [answer for answer in load.answers if not answer.done.is_set()]
        for answer in still_open:
            cluster.gateway.abort(answer)
        await cluster.start_decode("decode-0")
        await cluster.gateway.idle()
        assert still_open
        assert not any(answer.done.is_set() for answer in still_open)


# --- bytes that change in the pool


def flip_bytes(path: Path, offsets: list[int]) -> None:
    """Flip bytes from outside: through the file, as a stray writer would."""
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 0xFF]))


async def test_corrupted_bytes_in_the_pool_are_never_tokens(tmp_path: Path) -> None:
    async with running(small_config(tmp_path / "model"), tmp_path) as cluster:
        await cluster.stop("decode-0")
        load = Load(cluster)
        await holds(lambda: cluster.gateway.status is not None and cluster.gateway.status.num_pooled == 6)
        layout = cluster.served.block_layout(cluster.config.engine.block_size)
        arena = Arena.attach(cluster.arena_path, layout)
        first_blocks: dict[int, int] = {}  # by lease
        for block_id, generation in enumerate(arena.generations.tolist()):
            if generation:
                first_blocks.setdefault(generation, block_id)
        blocks_at = cluster.arena_path.stat().st_size - arena.num_blocks * layout.block_bytes
        arena.close()
        spoilt = list(first_blocks.values())[::2]
        flip_bytes(cluster.arena_path, [blocks_at + block_id * layout.block_bytes + 5 for block_id in spoilt])
        await cluster.start_decode("decode-0")
        status = await load.check()
        assert status.num_handoffs_refused == len(spoilt) == 3
        # Each request ends with one handoff that holds: its first, or that of its recomputed cache.
        assert status.num_handoffs_verified == len(load.prompts)
        assert all(answer.num_repeats == 0 for answer in load.answers)


async def test_a_pool_that_comes_back_gives_out_other_leases(tmp_path: Path) -> None:
    """Workers may still act on the ones before: an offload that waited, a release that came late."""
    generations: list[set[int]] = []
    async with running(small_config(tmp_path / "model"), tmp_path) as cluster:
        await cluster.stop("decode-0")
        load = Load(cluster)
        for life in range(2):
            await holds(lambda: cluster.gateway.status is not None and cluster.gateway.status.num_pooled == 6)
            arena = Arena.attach(cluster.arena_path, cluster.served.block_layout(cluster.config.engine.block_size))
            generations.append(set(arena.generations.tolist()) - {0})
            arena.close()
            if life == 0:
                await cluster.stop("pool-0")
                cluster.gateway.status = None
                await cluster.start_pool()
        await cluster.start_decode("decode-0")
        await load.check()
    assert [len(leases) for leases in generations] == [6, 6]
    assert generations[0].isdisjoint(generations[1])
