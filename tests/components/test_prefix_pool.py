"""Workers with the pool of their node for prefix blocks, on one event loop: real blocks, real bytes."""

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from alignedserve.config.sections import ClusterConfig, PrefixCacheConfig, SchedulingConfig, Topology
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import WorkerName
from alignedserve.core.request import SamplingParams
from alignedserve.process.process_spec import POOL
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.worker_core.logic import ColocatedLogic
from alignedserve.worker_core.service import Worker
from kvpool.logic import PoolLogic
from kvpool.service import KvPool
from router.prefix_index import PrefixIndex
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config
from tests.harnesses.clusters.two_nodes import FAR, two_nodes
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
FEW = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = [5 + number % 90 for number in range(400)]  # fifty blocks
ROOT = b"r" * 16


def config_of(folder: Path, *, count: int = 2) -> ClusterConfig:
    config = small_config(
        folder / "model",
        topology=Topology.COLOCATED,
        scheduling=SchedulingConfig(policy="fcfs"),
        prefix_cache=PrefixCacheConfig(host_bytes=1 << 20),
    )
    return replace(config, decode=replace(config.decode, count=count))


def kept(cluster: RoomCluster) -> int:
    """Count the blocks that the pool keeps."""
    pool = cluster.components[POOL]
    assert isinstance(pool, KvPool)
    assert isinstance(pool._driver._logic, PoolLogic)
    return len(pool._driver._logic._prefixes.cached)


def loaded(cluster: RoomCluster, name: str) -> int:
    worker = cluster.components[name]
    assert isinstance(worker, Worker)
    assert isinstance(worker._driver._logic, ColocatedLogic)
    pooled = worker._driver._logic._pooled
    assert pooled is not None
    pooled._tokens_per_s = lambda: 1.0  # the tiny model computes faster than anything can be asked
    return pooled.num_loaded_tokens


async def test_the_requests_of_a_lost_worker_go_on_from_the_pool(tmp_path: Path) -> None:
    async with running(config_of(tmp_path), tmp_path) as cluster:
        loaded(cluster, "decode-0"), loaded(cluster, "decode-1")
        answer = cluster.gateway.submit(PROMPT, GREEDY, prefix_root=ROOT)
        await holds(lambda: kept(cluster) >= 50 and bool(answer.token_ids))  # the last token known is computed anew
        holder, other = sorted(cluster.engines, key=lambda name: -cluster.engines[name].num_added)
        await cluster.stop(holder)
        async with asyncio.timeout(20):
            await answer.done.wait()
        assert loaded(cluster, other) >= 400
        assert cluster.engines[other].num_computed < 400
        assert answer.token_ids == cluster.reference(PROMPT, GREEDY)


async def test_bytes_that_do_not_verify_are_computed_again(tmp_path: Path) -> None:
    async with running(config_of(tmp_path, count=1), tmp_path) as cluster:
        loaded(cluster, "decode-0")
        await cluster.gateway.submit(PROMPT, FEW, prefix_root=ROOT).done.wait()
        await holds(lambda: kept(cluster) >= 50)
        layout: BlockLayout = cluster.served.block_layout(cluster.config.engine.block_size)
        arena = Arena.attach(cluster.arena_path, layout)
        arena.blocks[:] = np.roll(arena.blocks, 1, axis=1)
        arena.close()
        await cluster.stop("decode-0")
        await cluster.start_decode("decode-0")
        loaded(cluster, "decode-0")
        again = cluster.gateway.submit(PROMPT, FEW, prefix_root=ROOT)
        async with asyncio.timeout(20):
            await again.done.wait()
        assert again.token_ids == cluster.reference(PROMPT, FEW)
        assert loaded(cluster, "decode-0") == 0


async def test_a_worker_of_another_node_loads_over_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(PrefixIndex, "far_pool", lambda *_: WorkerName(POOL))
    cluster = two_nodes(config_of(tmp_path), tmp_path / "nodes", has_tls=True)
    try:
        await cluster.start_router()
        await cluster.start_pool()
        await cluster.gateway.start()
        await cluster.start_decode("decode-0")
        await cluster.gateway.submit(PROMPT, FEW, prefix_root=ROOT).done.wait()
        await holds(lambda: kept(cluster) >= 50)
        await cluster.stop("decode-0")
        cluster.arena_path.unlink()  # as on another host
        await cluster.start_decode(FAR)
        loaded(cluster, FAR)
        await cluster.gateway.generate(PROMPT[::-1], FEW)  # the pool is dialled, and no request waits for that
        await holds(lambda: POOL in links_of(cluster, FAR))
        answer = cluster.gateway.submit(PROMPT, FEW, prefix_root=ROOT)
        async with asyncio.timeout(20):
            await answer.done.wait()
        assert answer.token_ids == cluster.reference(PROMPT, FEW)
        assert loaded(cluster, FAR) >= 392
        assert "are reached by tcp" in caplog.text
    finally:
        await cluster.close()


def links_of(cluster: RoomCluster, name: str) -> set[str]:
    """Return the pools that a worker can ask."""
    worker = cluster.components[name]
    assert isinstance(worker, Worker)
    assert isinstance(worker._driver._logic, ColocatedLogic)
    assert worker._driver._logic._pooled is not None
    return {pool for pool, link in worker._driver._logic._pooled._links.items() if link.is_open}
