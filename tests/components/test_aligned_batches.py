"""Batches that replace each other, evictions into prefill workers' memory, and going on from the pool's copy.

Whatever moves where, every answer is the undisturbed one, and nothing is left behind.
"""

from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.config.sections import BatchingConfig, ClusterConfig, SchedulingConfig
from alignedserve.core.request import SamplingParams, Slo
from tests.components.work import check, prompts
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


def config_of(policy: str, folder: Path, *, decode_blocks: int = 256, num_workers: int = 1) -> ClusterConfig:
    batching = BatchingConfig(policy=policy, min_requests=4, starvation_s=0.2)
    config = small_config(folder, decode_blocks=decode_blocks, batching=batching)
    return replace(
        config,
        prefill=replace(config.prefill, count=num_workers),
        decode=replace(config.decode, count=num_workers),
        router=replace(config.router, max_retries=20),
    )


def num_evictions(cluster: RoomCluster) -> int:
    return cluster.gateway.status.num_evictions if cluster.gateway.status is not None else 0


@pytest.mark.parametrize(("policy", "num_workers"), [("density_first", 2), ("fcfs", 1)])
async def test_requests_that_are_evicted_come_back_and_go_on(policy: str, num_workers: int, tmp_path: Path) -> None:
    config = config_of(policy, tmp_path / "model", decode_blocks=40, num_workers=num_workers)
    async with running(config, tmp_path) as cluster:
        work = prompts(20)
        answers = [cluster.gateway.submit(prompt, SAMPLING) for prompt in work]
        status = await check(cluster, work, answers, SAMPLING)
        assert status.num_evictions > 0
        assert status.num_preemptions == 0
        assert status.num_handoffs_refused == 0
        assert all(answer.num_repeats == 0 for answer in answers)
    assert cluster.files_in_memory() == []


async def test_without_buffers_a_request_that_gives_way_is_computed_again(tmp_path: Path) -> None:
    config = config_of("density_first", tmp_path / "model", decode_blocks=40)
    scheduling = SchedulingConfig(policy="aligned")  # which evicts into such buffers alone
    config = replace(config, scheduling=scheduling, prefill=replace(config.prefill, candidate_buffer_bytes=0))
    async with running(config, tmp_path) as cluster:
        work = prompts(12)
        answers = [cluster.gateway.submit(prompt, SAMPLING) for prompt in work]
        status = await check(cluster, work, answers, SAMPLING)
        assert status.num_evictions == 0


async def test_requests_of_any_length_are_packed_beside_each_other_and_answers_stay_the_same(tmp_path: Path) -> None:
    config = config_of("density_first", tmp_path / "model", decode_blocks=60, num_workers=2)
    packed = replace(config.batching, pack_share=0.9)
    async with running(
        replace(config, scheduling=SchedulingConfig(policy="aligned"), batching=packed), tmp_path
    ) as cluster:
        work, chat = prompts(24), Slo(tpot_s=0.5)
        answers = [
            cluster.gateway.submit(prompt, SAMPLING, chat if number % 2 else None) for number, prompt in enumerate(work)
        ]
        await check(cluster, work, answers, SAMPLING)
    assert cluster.files_in_memory() == []


async def test_a_lost_decode_workers_requests_go_on_from_the_pools_copies(tmp_path: Path) -> None:
    async with running(config_of("fcfs", tmp_path / "model"), tmp_path) as cluster:
        work = [[5 + number] * 100 for number in range(6)]
        answers = [cluster.gateway.submit(prompt, SAMPLING) for prompt in work]
        await holds(lambda: all(len(answer.token_ids) >= 3 for answer in answers))
        engine = cluster.engines["prefill-0"]
        assert engine.num_computed == 600
        await cluster.stop("decode-0")
        num_known = [len(answer.token_ids) for answer in answers if not answer.done.is_set()]
        await cluster.start_decode("decode-0")
        await check(cluster, work, answers, SAMPLING)
        assert num_known
        # Of every context, only what came after the prompt; without the copies, a hundred tokens more of each.
        assert 0 < engine.num_computed - 600 <= sum(num_known)
    assert cluster.files_in_memory() == []


@pytest.mark.parametrize(("lost", "num_workers"), [("decode-0", 2), ("prefill-0", 1), ("pool-0", 1)])
async def test_a_process_is_lost_while_requests_are_evicted(lost: str, num_workers: int, tmp_path: Path) -> None:
    config = config_of("density_first", tmp_path / "model", decode_blocks=40, num_workers=num_workers)
    async with running(config, tmp_path) as cluster:
        work = prompts(20)
        answers = [cluster.gateway.submit(prompt, SAMPLING) for prompt in work]
        await holds(lambda: num_evictions(cluster) > 0)
        await cluster.stop(lost)
        await cluster.start_again(lost)
        await check(cluster, work, answers, SAMPLING)
    assert cluster.files_in_memory() == []
