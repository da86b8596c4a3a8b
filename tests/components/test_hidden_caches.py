"""A colocated worker under Apt-Serve's policy, whose memory is too small for the keys and values of all requests."""

import asyncio
import json
from pathlib import Path

import pytest

from alignedserve.config.sections import ClusterConfig, SchedulingConfig, Topology
from alignedserve.core.request import SamplingParams
from tests.support.in_process import TINY_LLAMA, RoomCluster, small_config

pytestmark = pytest.mark.slow

# So cheap that a hidden cache pays as soon as blocks are short, whatever this machine takes for one.
_SETTINGS = {"hidden_token_s": 1e-7}


def apt_config(folder: Path, policy: str) -> ClusterConfig:
    scheduling = SchedulingConfig(policy=policy, policy_params=dict(_SETTINGS))
    config = small_config(folder, topology=Topology.COLOCATED, scheduling=scheduling, decode_blocks=60)
    of_own = {**TINY_LLAMA, "num_key_value_heads": TINY_LLAMA["num_attention_heads"]}
    (folder / "config.json").write_text(json.dumps(of_own))
    return config


@pytest.mark.parametrize("policy", ["apt_serve", "apt_serve_chunked"])
async def test_answers_are_as_if_everybody_had_keys_and_values(policy: str, tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [[3 + (7 * number + position) % 120 for position in range(10 + 3 * number)] for number in range(12)]
    cluster = RoomCluster(apt_config(tmp_path / "model", policy), tmp_path)
    await cluster.start()
    try:
        engine = cluster.engines["decode-0"]
        answers = await asyncio.gather(*(cluster.gateway.generate(prompt, sampling) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == cluster.reference(prompt, sampling)
        await cluster.gateway.idle()
    finally:
        await cluster.close()
    assert engine.num_added_hidden > 0
    assert engine.num_added > engine.num_added_hidden
