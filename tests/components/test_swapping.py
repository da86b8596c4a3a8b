"""A colocated worker whose memory is too small for all that it runs: whole caches go to host memory and come back."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from alignedserve.config.sections import ClusterConfig, SchedulingConfig, Topology
from alignedserve.core.request import SamplingParams
from tests.support.in_process import RoomCluster, small_config

pytestmark = pytest.mark.slow


def some_prompts() -> list[list[int]]:
    return [[3 + (7 * number + position) % 120 for position in range(10 + 3 * number)] for number in range(8)]


def swapping_config(folder: Path, **decode: object) -> ClusterConfig:
    scheduling = SchedulingConfig(policy="fcfs", policy_params={"preemption": "swap"})
    config = small_config(folder, topology=Topology.COLOCATED, scheduling=scheduling, decode_blocks=24)
    return msgspec.structs.replace(config, decode=msgspec.structs.replace(config.decode, **decode))


async def test_answers_are_as_if_nothing_had_been_swapped_out(tmp_path: Path) -> None:
    config = swapping_config(tmp_path / "model")
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = some_prompts()
    cluster = RoomCluster(config, tmp_path)
    await cluster.start()
    try:
        engine = cluster.engines["decode-0"]
        answers = await asyncio.gather(*(cluster.gateway.generate(prompt, sampling) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == cluster.reference(prompt, sampling)
            assert answer.num_repeats == 0
        status = await cluster.gateway.idle()
    finally:
        await cluster.close()
    assert engine.num_swapped_out == engine.num_swapped_in == status.num_evictions > 0


async def test_rounded_copies_come_back_and_are_answered_from(tmp_path: Path) -> None:
    config = swapping_config(tmp_path / "model", swap_format="int8")
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    cluster = RoomCluster(config, tmp_path)
    await cluster.start()
    try:
        engine = cluster.engines["decode-0"]
        answers = await asyncio.gather(*(cluster.gateway.generate(prompt, sampling) for prompt in some_prompts()))
        references = [cluster.reference(prompt, sampling) for prompt in some_prompts()]
        status = await cluster.gateway.idle()
    finally:
        await cluster.close()
    assert engine.num_swapped_out == engine.num_swapped_in == status.num_evictions > 0
    assert [len(answer.token_ids) for answer in answers] == [40] * len(answers)
    # A model with random weights hardly prefers one token to another, so a rounded cache soon leads it elsewhere.
    starts = [answer.token_ids[:3] == reference[:3] for answer, reference in zip(answers, references, strict=True)]
    assert sum(starts) > len(starts) / 2
