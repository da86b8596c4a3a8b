"""Decodes that wait in the pool of their node while memory is short, on one event loop: real blocks, real bytes."""

import asyncio
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from alignedserve.config.sections import ClusterConfig, PrefixCacheConfig, SchedulingConfig, Topology
from alignedserve.core.request import RequestClass, SamplingParams
from alignedserve.process.process_spec import POOL
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.scheduling.yielding import StoppablePass, YieldConfig, Yielding
from alignedserve.worker_core.logic import ColocatedLogic
from alignedserve.worker_core.pooled_decodes import PooledDecodes
from alignedserve.worker_core.service import Worker
from alignedserve.worker_core.worker_logic import UrgentCycle
from kvpool.logic import PoolLogic
from kvpool.service import KvPool
from tests.components.work import check, growing_prompts
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiny model, which computes anything faster than it is copied, use the pool."""
    at_once = property(lambda self: 0.0, lambda self, seconds: None)
    monkeypatch.setattr(PooledDecodes, "_block_s", at_once, raising=False)


def config_of(folder: Path, *, count: int = 1, has_prefix_cache: bool = False) -> ClusterConfig:
    """Configure workers with memory for three of eight requests, and no host memory of their own."""
    config = small_config(folder / "model", topology=Topology.ELASTIC, decode_blocks=36)
    decode = replace(config.decode, count=count, swap_space_bytes=0, pool_bytes=1 << 20)
    return replace(config, decode=decode, prefix_cache=PrefixCacheConfig(enabled=has_prefix_cache))


def decodes_of(cluster: RoomCluster, name: str = "decode-0") -> PooledDecodes:
    worker = cluster.components[name]
    assert isinstance(worker, Worker)
    assert isinstance(worker._driver._logic, ColocatedLogic)
    decodes = worker._driver._logic._decodes
    assert decodes is not None
    return decodes


def num_used(cluster: RoomCluster) -> int:
    """Count the blocks of the pool that requests hold."""
    pool = cluster.components[POOL]
    assert isinstance(pool, KvPool)
    assert isinstance(pool._driver._logic, PoolLogic)
    logic = pool._driver._logic
    return logic._lease_table.num_used - logic._prefixes.num_blocks


@pytest.mark.parametrize("has_prefix_cache", [False, True])
async def test_they_come_back_and_go_on_as_if_they_had_stayed(has_prefix_cache: bool, tmp_path: Path) -> None:
    config = config_of(tmp_path, has_prefix_cache=has_prefix_cache)
    async with running(config, tmp_path) as cluster:
        work = growing_prompts()
        answers = [cluster.gateway.submit(prompt, SAMPLING) for prompt in work]
        await check(cluster, work, answers, SAMPLING)
        assert decodes_of(cluster).num_left > 0
        assert cluster.engines["decode-0"].num_computed < 2 * sum(map(len, work)) + 60 * len(work)
        await holds(lambda: num_used(cluster) == 0)


@pytest.mark.parametrize("has_prefix_cache", [False, True])
async def test_passes_stop_beside_them_and_every_answer_is_as_alone(
    has_prefix_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = partial(YieldConfig, least_gain_s=-1.0, credit_s=1e9, least_share=0.0, most_stops=1000)
    monkeypatch.setattr("alignedserve.scheduling.factory.YieldConfig", eager)
    monkeypatch.setattr(Yielding, "_is_within_floor", lambda *_: True)
    monkeypatch.setattr(StoppablePass, "left_s", lambda *_: 9.0)  # a pass of the tiny model takes a millisecond
    begun: list[UrgentCycle] = []
    began = UrgentCycle.began

    def note(cycle: UrgentCycle) -> None:
        begun.append(cycle)
        began(cycle)

    monkeypatch.setattr(UrgentCycle, "began", note)
    config = config_of(tmp_path, has_prefix_cache=has_prefix_cache)
    config = replace(config, scheduling=SchedulingConfig(yield_between_layers=True))
    async with running(config, tmp_path) as cluster:
        documents, chats = growing_prompts(), [[5, 6 + number] for number in range(12)]
        submit, best_effort = cluster.gateway.submit, RequestClass.BEST_EFFORT
        answers = [submit(document, SAMPLING, request_class=best_effort) for document in documents]
        await holds(lambda: decodes_of(cluster).num_left > 0)
        for chat in chats:
            answers.append(submit(chat, SAMPLING))
            await asyncio.sleep(0.01)
        await check(cluster, [*documents, *chats], answers, SAMPLING)
        assert begun
        await holds(lambda: num_used(cluster) == 0)


async def test_a_lost_pool_costs_computing_again_and_no_answer(tmp_path: Path) -> None:
    async with running(config_of(tmp_path), tmp_path) as cluster:
        work = growing_prompts()
        answers = [cluster.gateway.submit(prompt, SAMPLING) for prompt in work]
        await holds(lambda: bool(decodes_of(cluster)._away))
        await cluster.stop(POOL)
        await cluster.start_pool()
        await check(cluster, work, answers, SAMPLING)


async def test_what_a_lost_worker_left_in_the_pool_is_freed(tmp_path: Path) -> None:
    async with running(config_of(tmp_path, count=2), tmp_path) as cluster:
        work = [*growing_prompts(), *growing_prompts()]
        answers = [cluster.gateway.submit(prompt, SAMPLING) for prompt in work]
        names = ("decode-0", "decode-1")
        await holds(lambda: any(decodes_of(cluster, name).num_left for name in names))
        await cluster.stop(max(names, key=lambda name: decodes_of(cluster, name).num_left))
        await check(cluster, work, answers, SAMPLING)
        await holds(lambda: num_used(cluster) == 0)


async def test_bytes_that_do_not_verify_are_computed_again(tmp_path: Path) -> None:
    async with running(config_of(tmp_path), tmp_path) as cluster:
        work = growing_prompts()
        answers = [cluster.gateway.submit(prompt, SAMPLING) for prompt in work]
        await holds(lambda: bool(decodes_of(cluster)._away))
        arena = Arena.attach(cluster.arena_path, cluster.served.block_layout(cluster.config.engine.block_size))
        arena.blocks[:] = np.roll(arena.blocks, 1, axis=1)
        arena.close()
        await check(cluster, work, answers, SAMPLING)


async def test_requests_whose_clients_leave_are_gone_from_the_pool(tmp_path: Path) -> None:
    async with running(config_of(tmp_path), tmp_path) as cluster:
        answers = [cluster.gateway.submit(prompt, SAMPLING) for prompt in growing_prompts()]
        await holds(lambda: bool(decodes_of(cluster)._away))
        for answer in answers:
            cluster.gateway.abort(answer)
        await holds(lambda: num_used(cluster) == 0 and not decodes_of(cluster)._away)
        async with asyncio.timeout(20):
            await cluster.gateway.idle()
