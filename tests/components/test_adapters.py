"""Requests with adapters and without, side by side: through losses, moves and preemption, and in the prefix cache."""

import asyncio
import shutil
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.api.prefix_hasher import PrefixHasher
from alignedserve.config.sections import (
    BatchingConfig,
    ClusterConfig,
    LoraConfig,
    PrefixCacheConfig,
    RecordingConfig,
    SchedulingConfig,
    Topology,
)
from alignedserve.core.request import LoraAdapter, SamplingParams, Slo
from alignedserve.messages.gateways import RequestFailed
from alignedserve.runtime.model.model_files import read_config
from tests.harnesses.client_gateway import Answer
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config
from tests.replay.recorded import replays
from tests.support.models.lora_folders import write_adapter
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

COLOCATED, SEPARATE, ELASTIC = Topology.COLOCATED, Topology.DISAGGREGATED, Topology.ELASTIC
SAMPLING = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
FEW = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
TOO_TIGHT = Slo(tpot_s=1e-6)  # its decodes leave a worker no time for prompts
PROMPT = [5, 6, 7, 8, 9]
NUM_OF_EACH = 2
LONG_PROMPT = [5 + number % 90 for number in range(64)]  # eight blocks
HASHER = PrefixHasher(b"k" * 32, form=b"form", block_size=8)


def adapting_config(folder: Path, *, max_adapters: int = 16, decode_blocks: int = 256, **changes: Any) -> ClusterConfig:
    """Configure the tiny model with two adapters."""
    config = small_config(folder / "model", decode_blocks=decode_blocks, **changes)
    model = read_config(folder / "model")
    for seed, name in enumerate(("one", "two")):
        write_adapter(folder / name, model, seed=seed)
    folders = {name: str(folder / name) for name in ("one", "two")}
    return replace(config, lora=LoraConfig(folders, max_adapters=max_adapters, memory_bytes=1 << 20))


def choices(cluster: RoomCluster) -> list[LoraAdapter | None]:
    return [None, *cluster.served.adapters] * NUM_OF_EACH


def submit_all(cluster: RoomCluster, sampling: SamplingParams = SAMPLING, slo: Slo | None = None) -> list[Answer]:
    """Submit one prompt with each adapter and without, several times."""
    return [cluster.gateway.submit(PROMPT, sampling, slo, adapter=adapter) for adapter in choices(cluster)]


async def check(cluster: RoomCluster, answers: list[Answer], sampling: SamplingParams = SAMPLING) -> None:
    """Wait for the answers of `submit_all`, each of which must be as if computed alone."""
    async with asyncio.timeout(40):
        await asyncio.gather(*(answer.done.wait() for answer in answers))
    right = {adapter: cluster.reference(PROMPT, sampling, adapter) for adapter in dict.fromkeys(choices(cluster))}
    assert len({tuple(tokens) for tokens in right.values()}) == len(right)
    for adapter, answer in zip(choices(cluster), answers, strict=True):
        assert answer.failure is None
        assert answer.token_ids == right[adapter]


@pytest.mark.parametrize(("topology", "lost"), [(COLOCATED, None), (SEPARATE, "decode-0"), (ELASTIC, "decode-0")])
async def test_answers_go_on_and_are_decided_again(topology: Topology, lost: str | None, tmp_path: Path) -> None:
    recording = RecordingConfig(folder=str(tmp_path / "run"))
    async with running(adapting_config(tmp_path, topology=topology, recording=recording), tmp_path) as cluster:
        answers = submit_all(cluster)
        if lost is not None:
            await holds(lambda: all(len(answer.token_ids) >= 8 for answer in answers))
            await cluster.stop(lost)
            await cluster.start_decode(lost)
        await check(cluster, answers)
        await cluster.gateway.idle()
    assert [one.name for one in replays(tmp_path / "run") if one.difference is not None] == []


async def test_a_worker_that_takes_over_decodes_with_the_same_adapters(tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    async with running(adapting_config(tmp_path, topology=Topology.ELASTIC), tmp_path) as cluster:
        answers = submit_all(cluster, sampling, TOO_TIGHT)
        await answers[0].first_token.wait()
        await cluster.start_decode("decode-1")
        await check(cluster, answers, sampling)
        assert all(answer.num_repeats == 0 for answer in answers)
        status = await cluster.gateway.idle()
        assert status.num_handoffs_verified > 0


@pytest.mark.parametrize(
    ("topology", "policy", "preemption", "max_adapters"),
    [
        (Topology.COLOCATED, "fcfs", "drop", 1),
        (Topology.DISAGGREGATED, "alise", "swap", 16),
    ],
)
async def test_what_is_preempted_comes_back_with_its_adapter(
    topology: Topology, policy: str, preemption: str, max_adapters: int, tmp_path: Path
) -> None:
    config = adapting_config(
        tmp_path,
        topology=topology,
        scheduling=SchedulingConfig(policy=policy, policy_params={"preemption": preemption}),
        batching=BatchingConfig(policy="fcfs", min_requests=4, starvation_s=0.1),
        decode_blocks=12,
        max_adapters=max_adapters,
    )
    sampling = changed(SAMPLING, max_tokens=40)
    async with running(config, tmp_path) as cluster:
        await check(cluster, submit_all(cluster, sampling), sampling)
        status = await cluster.gateway.idle()
        assert status.num_evictions > 0


async def generate(cluster: RoomCluster, adapter: LoraAdapter | None) -> tuple[list[int], int]:
    """Return the answer to the long prompt, and how many of its tokens were computed."""
    before = sum(engine.num_computed for engine in cluster.engines.values())
    root = HASHER.root("", None, adapter.digest if adapter is not None else b"")
    answer = cluster.gateway.submit(LONG_PROMPT, FEW, prefix_root=root, adapter=adapter)
    async with asyncio.timeout(20):
        await answer.done.wait()
    await cluster.gateway.idle()
    assert answer.failure is None
    return answer.token_ids, sum(engine.num_computed for engine in cluster.engines.values()) - before


@pytest.mark.parametrize("topology", [Topology.DISAGGREGATED, Topology.ELASTIC])
async def test_prefixes_are_shared_within_an_adapter_alone(topology: Topology, tmp_path: Path) -> None:
    config = adapting_config(tmp_path, topology=topology, prefix_cache=PrefixCacheConfig(host_bytes=1 << 20))
    async with running(config, tmp_path) as cluster:
        for is_known in (False, True):
            for adapter in dict.fromkeys(choices(cluster)):
                tokens, num_computed = await generate(cluster, adapter)
                assert tokens == cluster.reference(LONG_PROMPT, FEW, adapter)
                assert (num_computed < len(LONG_PROMPT)) == is_known


@pytest.mark.parametrize("topology", [Topology.DISAGGREGATED, Topology.ELASTIC])
async def test_an_adapter_whose_files_are_gone_fails_its_requests_alone(topology: Topology, tmp_path: Path) -> None:
    config = adapting_config(tmp_path, topology=topology, prefix_cache=PrefixCacheConfig(host_bytes=1 << 20))
    async with running(config, tmp_path) as cluster:
        one, two = cluster.served.adapters
        shutil.move(one.path, tmp_path / "kept")
        failed = [cluster.gateway.submit(LONG_PROMPT, FEW, prefix_root=HASHER.root("", None, one.digest), adapter=one)]
        shutil.copytree(two.path, one.path)
        failed.append(cluster.gateway.submit(PROMPT, FEW, adapter=one))
        await generate(cluster, two)
        await generate(cluster, None)
        async with asyncio.timeout(20):
            await asyncio.gather(*(answer.done.wait() for answer in failed))
        for answer in failed:
            assert isinstance(answer.failure, RequestFailed)
            assert "adapter" in answer.failure.reason
            assert answer.token_ids == []
        await cluster.gateway.idle()
        shutil.rmtree(one.path)
        shutil.move(tmp_path / "kept", one.path)
        tokens, num_computed = await generate(cluster, one)
        assert tokens == cluster.reference(LONG_PROMPT, FEW, one)
        assert num_computed >= len(LONG_PROMPT)


async def test_where_another_worker_cannot_load_it_the_request_fails_alone(tmp_path: Path) -> None:
    async with running(adapting_config(tmp_path, topology=Topology.DISAGGREGATED), tmp_path) as cluster:
        one, two = cluster.served.adapters
        chosen = [one, two, None]
        answers = [cluster.gateway.submit(PROMPT, SAMPLING, adapter=adapter) for adapter in chosen]
        await holds(lambda: all(len(answer.token_ids) >= 4 for answer in answers))
        (Path(one.path) / "adapter_config.json").unlink()
        await cluster.stop("decode-0")
        await cluster.start_decode("decode-0")
        async with asyncio.timeout(20):
            await asyncio.gather(*(answer.done.wait() for answer in answers))
        assert isinstance(answers[0].failure, RequestFailed)
        assert "adapter" in answers[0].failure.reason
        for adapter, answer in zip(chosen[1:], answers[1:], strict=True):
            assert answer.token_ids == cluster.reference(PROMPT, SAMPLING, adapter)
        await cluster.gateway.idle()
