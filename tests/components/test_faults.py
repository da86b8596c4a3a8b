"""Rooms that go and come back in the middle of answers: every answer is the undisturbed one, and nothing leaks."""

import asyncio
from dataclasses import replace as replace_params
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.config.sections import ClusterConfig, RouterConfig, Topology
from alignedserve.core.request import FinishReason, SamplingParams, Slo
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.runtime.kv.shm_arena import Arena
from tests.components.work import check, prompts
from tests.harnesses.client_gateway import Answer
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

# Long enough that all are in the middle of it when something happens.
SAMPLING = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


class Load:
    """Requests in flight on a cluster."""

    def __init__(
        self, cluster: RoomCluster, count: int = 6, sampling: SamplingParams = SAMPLING, slo: Slo | None = None
    ) -> None:
        self.cluster = cluster
        self.sampling = sampling
        self.prompts = prompts(count, 2, 60, seed=0)
        self.answers: list[Answer] = [cluster.gateway.submit(prompt, sampling, slo) for prompt in self.prompts]

    async def until_tokens(self, count: int) -> None:
        """Wait until every answer has this many tokens."""
        await holds(lambda: all(len(answer.token_ids) >= count for answer in self.answers))

    async def check(self) -> ClusterStatus:
        """Wait for all answers; each must be right, whole and without a gap, and nothing may be held after it."""
        status = await check(self.cluster, self.prompts, self.answers, self.sampling)
        assert all(answer.finish_reason is FinishReason.LENGTH for answer in self.answers)
        return status


def two_of_each(folder: Path, topology: Topology) -> ClusterConfig:
    config = small_config(folder, topology=topology)
    return replace(config, prefill=replace(config.prefill, count=2), decode=replace(config.decode, count=2))


@pytest.mark.parametrize(
    ("topology", "name", "num_tokens"),
    [
        *((Topology.DISAGGREGATED, name, 5) for name in ("decode-0", "prefill-0", "pool-0", "router")),
        *((Topology.DISAGGREGATED, name, 0) for name in ("prefill-0", "router")),
        *((Topology.COLOCATED, name, 5) for name in ("decode-0", "router")),
    ],
)
async def test_a_room_is_lost_and_comes_back(topology: Topology, name: str, num_tokens: int, tmp_path: Path) -> None:
    async with running(small_config(tmp_path / "model", topology=topology), tmp_path) as cluster:
        load = Load(cluster)
        await load.until_tokens(num_tokens)
        await cluster.stop(name)
        await asyncio.sleep(0.05 if num_tokens else 0)
        await cluster.start_again(name)
        await load.check()


@pytest.mark.parametrize(
    ("topology", "name"),
    [(Topology.DISAGGREGATED, "decode-0"), (Topology.DISAGGREGATED, "prefill-0"), (Topology.ELASTIC, "decode-0")],
)
async def test_another_worker_goes_on(topology: Topology, name: str, tmp_path: Path) -> None:
    async with running(two_of_each(tmp_path / "model", topology), tmp_path) as cluster:
        load = Load(cluster, count=8)
        await load.until_tokens(3)
        await cluster.stop(name)
        await load.check()


async def test_a_worker_that_comes_takes_over_from_one_that_has_no_time(tmp_path: Path) -> None:
    """Requests move while they decode, and nothing is computed again."""
    async with running(small_config(tmp_path / "model", topology=Topology.ELASTIC), tmp_path) as cluster:
        longer, too_tight = replace_params(SAMPLING, max_tokens=300), Slo(tpot_s=1e-6)  # no time for prompts
        load = Load(cluster, 3, longer, too_tight)
        await load.answers[0].first_token.wait()
        await cluster.start_decode("decode-1")
        status = await load.check()
        assert all(answer.num_repeats == 0 for answer in load.answers)
    assert status.num_handoffs_verified > 0
    assert status.num_handoffs_refused == 0


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
            await cluster.start_again(name)
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
