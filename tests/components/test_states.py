"""Models with a state, or whose layers differ, in clusters: answers are those of one engine, whatever moves or ends.

Layers with a window that keep no more than it (`rings`) have blocks of their own as states have.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace as replace_params
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.config.sections import BatchingConfig, ClusterConfig, PrefixCacheConfig, SchedulingConfig, Topology
from alignedserve.core.request import SamplingParams, Slo
from alignedserve.messages.gateways import RequestFailed
from alignedserve.prefix_cache.block_hashes import prefix_root
from alignedserve.runtime.model.model_files import read_model_config
from tests.components.test_prefix_pool import ROOT, kept, loaded
from tests.components.work import check, growing_prompts, prompts
from tests.harnesses.client_gateway import Answer
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config
from tests.support.models.tiny_hybrids import DELTA, MAMBA2
from tests.support.models.tiny_llama import TINY_LLAMA
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
    "mamba2": MAMBA2,
    "delta": DELTA,
}

_SLIDING = {"head_dim": 8, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
_SHORT = {"num_hidden_layers": 4, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 128}
LAYERED = {
    "gemma3n": {"model_type": "gemma3n_text", **_SLIDING, **_SHORT, "num_kv_shared_layers": 2, "laurel_rank": 4}
    | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.5]},
    "gemma4": {"model_type": "gemma4_text", **_SLIDING, **_SHORT, "num_kv_shared_layers": 2, "global_head_dim": 16},
}
RINGS = {"rings": {"model_type": "gemma3_text", **_SLIDING, "sliding_window": 24, "num_hidden_layers": 4}}
MODELS |= LAYERED | RINGS
APART = ("mamba2", "delta", *RINGS)  # models of which contexts have blocks beside those of their tokens


def _config(
    folder: Path, model: str, topology: Topology, *, num_blocks: int = 256, block_size: int = 8
) -> ClusterConfig:
    config = small_config(folder, topology=topology)
    window_cache = "ring" if model in RINGS else "auto"
    config = replace(config, engine=replace(config.engine, block_size=block_size, window_cache=window_cache))
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, "num_hidden_layers": 3, **MODELS[model]}))
    block = read_model_config(folder).block_layout(config.engine.block_size, "float32").block_bytes
    return replace(
        config,
        pool=replace(config.pool, memory_bytes=256 * block),
        prefill=replace(config.prefill, kv_cache_bytes=256 * block, candidate_buffer_bytes=128 * block),
        decode=replace(config.decode, kv_cache_bytes=num_blocks * block),
    )


@pytest.mark.parametrize("model", list(MODELS))
async def test_requests_move_with_their_states(model: str, tmp_path: Path) -> None:
    async with running(_config(tmp_path / "model", model, Topology.ELASTIC), tmp_path) as cluster:
        longer, work = replace_params(SAMPLING, max_tokens=150), prompts(3, 2, 60, seed=0)
        answers = [cluster.gateway.submit(prompt, longer, Slo(tpot_s=1e-6)) for prompt in work]
        await answers[0].first_token.wait()
        await cluster.start_decode("decode-1")
        status = await check(cluster, work, answers, longer)
        assert all(answer.num_repeats == 0 for answer in answers)
    assert status.num_handoffs_verified > 0


@pytest.mark.parametrize("model", APART)
async def test_states_in_blocks_of_their_own_move(model: str, tmp_path: Path) -> None:
    config = _config(tmp_path / "model", model, Topology.ELASTIC, block_size=64)
    async with running(config, tmp_path) as cluster:
        longer, work = replace_params(SAMPLING, max_tokens=150), prompts(6, 30, 60, seed=0)
        answers = [cluster.gateway.submit(prompt, longer, Slo(tpot_s=1e-6)) for prompt in work]
        await answers[0].first_token.wait()
        assert cluster.engines["decode-0"].layout.state_blocks
        await cluster.start_decode("decode-1")
        status = await check(cluster, work, answers, longer)
    assert status.num_handoffs_verified > 0


async def test_states_in_blocks_of_their_own_leave(tmp_path: Path) -> None:
    config = replace(
        _config(tmp_path / "model", "mamba2", Topology.COLOCATED, num_blocks=5, block_size=64),
        scheduling=SchedulingConfig(policy="fcfs", policy_params={"preemption": "swap"}),
    )
    async with running(config, tmp_path) as cluster:
        engine, work = cluster.engines["decode-0"], growing_prompts()
        longer = replace_params(SAMPLING, max_tokens=120)
        answers = [cluster.gateway.submit(prompt, longer) for prompt in work]
        status = await check(cluster, work, answers, longer)
    assert engine.layout.state_blocks
    assert status.num_evictions > 0
    assert engine.num_swapped_out > 0


async def test_what_never_fits_beside_its_states_is_refused_at_the_door(tmp_path: Path) -> None:
    config = _config(tmp_path / "model", "mamba2", Topology.DISAGGREGATED, num_blocks=3, block_size=64)
    async with running(config, tmp_path) as cluster:
        engine = cluster.engines["decode-0"]
        room = (engine.num_blocks - engine.layout.state_blocks) * 64
        assert engine.layout.state_blocks
        (prompt,) = prompts(1, 30, 31)
        refused = cluster.gateway.submit(prompt, replace_params(SAMPLING, max_tokens=room - len(prompt) + 1))
        await refused.done.wait()
        assert isinstance(refused.failure, RequestFailed)
        assert "than any worker or pool of this cluster has" in refused.failure.reason
        assert not refused.token_ids


async def _lose_each_kind(cluster: RoomCluster, answers: Sequence[Answer]) -> None:
    """Stop a worker of each kind while answers are under way, and start it again."""
    for name in ("decode-0", "prefill-0"):
        await holds(lambda: all(len(answer.token_ids) >= 3 for answer in answers))
        await cluster.stop(name)
        await asyncio.sleep(0.05)
        await cluster.start_again(name)


@pytest.mark.parametrize("model", APART)
async def test_states_in_blocks_of_their_own_and_a_lost_worker_of_each_kind(model: str, tmp_path: Path) -> None:
    """Prompts that begin alike go on behind kept states; decodes resume from the states that the pool has."""
    config = _config(tmp_path / "model", model, Topology.DISAGGREGATED, block_size=64)
    async with running(config, tmp_path) as cluster:
        assert cluster.engines["prefill-0"].layout.state_blocks
        assert cluster.engines["decode-0"].layout.state_blocks
        (stem,) = prompts(1, 140, 141, seed=1)
        work = [[*stem, *rest] for rest in prompts(6, 2, 60, seed=0)]
        root = prefix_root(b"key", tenant="", salt="", form=b"")
        submit = partial(cluster.gateway.submit, sampling=SAMPLING, prefix_root=root)
        answers = [submit(prompt) for prompt in work]
        await _lose_each_kind(cluster, answers)
        await check(cluster, work, answers, SAMPLING)
        again = submit(work[0])
        await again.done.wait()
        status = await check(cluster, work, list(map(submit, work)), SAMPLING)
    assert status.prefixes.num_hit_tokens >= 128


@pytest.mark.parametrize("model", list(MODELS))
async def test_a_lost_worker_of_each_kind(model: str, tmp_path: Path) -> None:
    async with running(_config(tmp_path / "model", model, Topology.DISAGGREGATED), tmp_path) as cluster:
        work = prompts(6, 2, 60, seed=0)
        answers = [cluster.gateway.submit(prompt, SAMPLING) for prompt in work]
        await _lose_each_kind(cluster, answers)
        await check(cluster, work, answers, SAMPLING)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "gemma4"])
@pytest.mark.parametrize(
    ("topology", "policy", "preemption"),
    [(Topology.COLOCATED, "fcfs", "swap"), (Topology.DISAGGREGATED, "alise", "recompute")],
)
async def test_caches_that_leave(topology: Topology, policy: str, preemption: str, model: str, tmp_path: Path) -> None:
    config = replace(
        _config(tmp_path / "model", model, topology, num_blocks=24),
        scheduling=SchedulingConfig(policy=policy, policy_params={"preemption": preemption}),
        batching=BatchingConfig(policy="fcfs", min_requests=4, starvation_s=0.2),
    )
    async with running(config, tmp_path) as cluster:
        engine, work = cluster.engines["decode-0"], growing_prompts()
        answers = [cluster.gateway.submit(prompt, SAMPLING) for prompt in work]
        status = await check(cluster, work, answers, SAMPLING)
    assert status.num_evictions > 0
    assert (engine.num_swapped_out > 0) == (preemption == "swap")


@pytest.mark.parametrize("model", APART)
async def test_states_in_blocks_of_their_own_come_back_from_a_pool(model: str, tmp_path: Path) -> None:
    config = _config(tmp_path / "model", model, Topology.COLOCATED, block_size=64)
    config = replace(config, prefix_cache=PrefixCacheConfig(host_bytes=1 << 20))
    async with running(config, tmp_path) as cluster:
        (prompt,) = prompts(1, 400, 401, seed=1)
        assert loaded(cluster, "decode-0") == 0
        first = cluster.gateway.submit(prompt, SAMPLING, prefix_root=ROOT)
        await first.done.wait()
        of_states = cluster.engines["decode-0"].layout.state_blocks
        await holds(lambda: kept(cluster) >= 400 // 64 + of_states > 400 // 64)
        await cluster.stop("decode-0")
        await cluster.start_again("decode-0")
        assert loaded(cluster, "decode-0") == 0
        again = cluster.gateway.submit(prompt, SAMPLING, prefix_root=ROOT)
        await check(cluster, [prompt, prompt], [first, again], SAMPLING)
        assert loaded(cluster, "decode-0") == 384
        assert cluster.engines["decode-0"].num_computed < 100
