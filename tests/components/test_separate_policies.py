"""Separate decode workers whose policy preempts, with memory too small for all that they run: answers stay the same."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alignedserve.config.sections import BatchingConfig, ClusterConfig, SchedulingConfig, Topology
from alignedserve.core.request import SamplingParams
from tests.support.in_process import RoomCluster, small_config

pytestmark = pytest.mark.slow


def config_of(folder: Path, policy: str, params: dict[str, Any], **decode: object) -> ClusterConfig:
    scheduling = SchedulingConfig(policy=policy, policy_params=params)
    config = small_config(folder, topology=Topology.DISAGGREGATED, scheduling=scheduling, decode_blocks=24)
    batching = BatchingConfig(policy="fcfs", min_requests=4, starvation_s=0.2)
    return msgspec.structs.replace(config, batching=batching, decode=msgspec.structs.replace(config.decode, **decode))


@pytest.mark.parametrize(
    ("policy", "params", "decode"),
    [
        ("alise", {}, {}),
        ("alise", {"preemption": "recompute"}, {}),
        ("alise", {}, {"swap_format": "int8"}),
    ],
)
async def test_answers_are_as_if_no_cache_had_left(
    policy: str, params: dict[str, Any], decode: dict[str, Any], tmp_path: Path
) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [[3 + (7 * number + position) % 120 for position in range(10 + 3 * number)] for number in range(8)]
    cluster = RoomCluster(config_of(tmp_path / "model", policy, params, **decode), tmp_path)
    await cluster.start()
    try:
        engine = cluster.engines["decode-0"]
        answers = await asyncio.gather(*(cluster.gateway.generate(prompt, sampling) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.num_repeats == 0
            assert len(answer.token_ids) == 40
            # Rounded copies soon lead a model with random weights elsewhere.
            assert "swap_format" in decode or answer.token_ids == cluster.reference(prompt, sampling)
        status = await cluster.gateway.idle()
    finally:
        await cluster.close()
    assert status.num_evictions > 0
    assert (engine.num_swapped_out > 0) == (not params)
