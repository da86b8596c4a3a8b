"""Whole clusters on the fake CUDA: workers on GPUs of their own, whose answers are those of the CPU engine.

Streams do their work in any order that events allow, memory is another's as soon as nothing holds it, and blocks go
from GPU to GPU through memory that is mapped, as between processes.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace as replace_params
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace
from typing_extensions import override

from alignedserve.config.sections import BatchingConfig, ClusterConfig, PrefixCacheConfig, SchedulingConfig, Topology
from alignedserve.core.request import SamplingParams, Slo
from alignedserve.runtime.device import accelerator
from tests.components.work import check, prompts, submitted
from tests.harnesses.clusters.in_process import running, small_config
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.fake_cuda.quick_kernels import quick_kernels
from tests.support.fake_cuda.small_copies import small_copies
from tests.support.waiting import holds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAMPLING = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PREFILL, DECODE = "prefill-0", "decode-0"
GPUS = {PREFILL: "cuda:0", DECODE: "cuda:1", "prefill-1": "cuda:2", "decode-1": "cuda:2"}
STAGED_BYTES = 8192


class _Nothing(dict[object, object]):
    """Keeps nothing: what a worker exports is never the memory of another's own process."""

    @override
    def __setitem__(self, key: object, value: object) -> None:
        """Forget."""


@pytest.fixture
def fake(request: pytest.FixtureRequest) -> Iterator[FakeCuda]:
    seed = getattr(request, "param", 1)
    with (
        fake_cuda(seed, num_devices=3, device_bytes=1 << 30) as fake,
        quick_kernels(),
        mock.patch.object(accelerator, "_OF_THIS_PROCESS", _Nothing()),
        small_copies(STAGED_BYTES, are_listed=seed == 1),
    ):
        yield fake


def config_of(folder: Path, *, topology: Topology = Topology.DISAGGREGATED, count: int = 1) -> ClusterConfig:
    batching = BatchingConfig(min_requests=4, starvation_s=0.2)
    config = small_config(folder / "model", topology=topology, batching=batching)
    return replace(
        config,
        prefill=replace(config.prefill, count=count),
        decode=replace(config.decode, count=count, max_running_requests=8),
        router=replace(config.router, max_retries=20),
    )


@pytest.mark.parametrize("fake", [1, 2], indirect=True)
async def test_batches_are_prefetched_into_a_prefill_worker_s_gpu_and_read_from_there(
    fake: FakeCuda, tmp_path: Path
) -> None:
    async with running(config_of(tmp_path), tmp_path, gpus=GPUS) as cluster:
        work = prompts(12)
        answers = await submitted(cluster, work, SAMPLING)
        status = await check(cluster, work, answers, SAMPLING)
    assert status.num_handoffs_verified > 0
    assert status.num_handoffs_refused == 0
    assert fake.num_mapped > 0
    assert fake.machine.counts.pageable_copies < fake.machine.counts.copies / 10


@pytest.mark.parametrize("lost", [PREFILL, DECODE])
async def test_a_worker_is_killed_while_its_gpu_works(lost: str, fake: FakeCuda, tmp_path: Path) -> None:
    async with running(config_of(tmp_path), tmp_path, gpus=GPUS) as cluster:
        work = prompts(12)
        answers = await submitted(cluster, work, SAMPLING)
        with fake.machine.killed(int(GPUS[lost][-1])):
            await cluster.stop(lost)
        await cluster.start_again(lost)
        await check(cluster, work, answers, SAMPLING)


async def test_requests_move_from_gpu_to_gpu(fake: FakeCuda, tmp_path: Path) -> None:
    longer, too_tight = replace_params(SAMPLING, max_tokens=80), Slo(tpot_s=1e-6)  # no time for prompts
    async with running(config_of(tmp_path, topology=Topology.ELASTIC), tmp_path, gpus=GPUS) as cluster:
        work = [[5 + number, 6, 7, 8 + number] for number in range(3)]
        answers = [cluster.gateway.submit(prompt, longer, too_tight) for prompt in work]
        await answers[0].first_token.wait()
        await cluster.start_decode("decode-1")
        status = await check(cluster, work, answers, longer)
    assert status.num_handoffs_verified > 0
    assert status.num_handoffs_refused == 0


async def test_a_prefix_is_copied_on_a_gpu_and_through_the_pool(fake: FakeCuda, tmp_path: Path) -> None:
    """The same prompt of whole blocks again and again, beside others: on the worker that has it, and elsewhere."""
    config = replace(
        config_of(tmp_path, topology=Topology.COLOCATED),
        scheduling=SchedulingConfig(policy="fcfs"),
        prefix_cache=PrefixCacheConfig(host_bytes=1 << 20),
    )
    async with running(config, tmp_path, gpus=GPUS) as cluster:
        work = [[5 + number % 90 for number in range(64)], *prompts(3)] * 2
        answers = []
        for prompt in work:
            answers.append(cluster.gateway.submit(prompt, SAMPLING, prefix_root=b"r" * 16))
            await asyncio.wait_for(answers[-1].first_token.wait(), 60)
        await holds(lambda: all(answer.token_ids for answer in answers))
        with fake.machine.killed(1):
            await cluster.stop(DECODE)
        await cluster.start_again(DECODE)
        await check(cluster, work, answers, SAMPLING)
