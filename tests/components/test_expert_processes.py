"""Processes that share a model's experts: the answers of one process, and what happens when one dies."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.config.sections import Topology
from alignedserve.core.request import SamplingParams
from kernels.cpu.rank_exchange import ExchangeBroken
from tests.components.work import check, prompts
from tests.harnesses.clusters.in_process import running, small_config
from tests.support.child_processes import children_running
from tests.support.models.tiny_llama import TINY_LLAMA

pytestmark = pytest.mark.slow

MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2}
SAMPLING = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


async def test_a_worker_of_two_processes(tmp_path: Path) -> None:
    config = small_config(tmp_path / "model", topology=Topology.COLOCATED)
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY_LLAMA | MIXTRAL))
    config = replace(config, engine=replace(config.engine, expert_parallel=2))
    async with running(config, tmp_path) as cluster:
        work = prompts(6, 2, 60, seed=0)
        await check(cluster, work, [cluster.gateway.submit(prompt, SAMPLING) for prompt in work], SAMPLING)
        executor = cluster.engines["decode-0"]
        (process,) = children_running("expert_group")
        process.kill()
        with pytest.raises(ExchangeBroken):
            executor.measure_iterations(0.01, 64)
