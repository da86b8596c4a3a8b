"""The iteration log of real iterations: clocks of the logic, of the computing thread and of the engine agree."""

import asyncio
import json
import statistics
from pathlib import Path

import pytest

from alignedserve.config.sections import Topology
from alignedserve.core.request import SamplingParams
from alignedserve.worker_core.service import Worker
from kernels.cpu.native import supported_levels
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config

pytestmark = pytest.mark.slow

NUM_REQUESTS, NUM_TOKENS = 8, 60
HANDED_OVER = 0.08  # of an iteration of this tiny model: a batch and its tokens between two threads, 25 us of 700


async def serve(cluster: RoomCluster) -> None:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [[3 + number] * (10 * number + 1) for number in range(NUM_REQUESTS)]
    await asyncio.gather(*(cluster.gateway.generate(prompt, sampling) for prompt in prompts))


@pytest.mark.parametrize("topology", list(Topology))
async def test_the_parts_add_up_to_the_wall_time(topology: Topology, tmp_path: Path) -> None:
    async with running(small_config(tmp_path / "model", topology=topology), tmp_path) as cluster:
        await serve(cluster)
        worker = cluster.components["decode-0"]
        assert isinstance(worker, Worker)
        records = worker.iteration_log.records()
        told_s = [answer.compute_s for answer in cluster.gateway.answers.values()]
    computed_s = sum(record.prepare_s + record.forward_s + record.sampling_s for record in records)
    assert all(told_s)
    assert sum(told_s) >= 0.99 * computed_s  # with separate workers prompts are not in this log
    assert topology.is_separate or sum(told_s) <= sum(record.wall_s for record in records)
    # The lower quartile: a thread may be held up between two readings, a part that is not counted is missing from all.
    missing_s = statistics.quantiles((record.wall_s - record.parts_s for record in records), n=4)[0]
    assert missing_s <= HANDED_OVER * statistics.median(record.wall_s for record in records)
    assert all(record.parts_s <= record.wall_s for record in records)
    assert 4 <= max(record.batch_size for record in records) <= NUM_REQUESTS  # four make a batch
    for record in records:
        assert record.shortest <= record.mean <= record.longest
        assert 0.0 <= record.misaligned_s <= record.attention_s <= record.forward_s
    # Only gathering pads: the native kernels read no slot for the sake of another sequence.
    assert (sum(record.misaligned_s for record in records) > 0.0) == (not supported_levels())


async def test_the_gateway_hears_of_it_and_a_clean_stop_leaves_a_file(tmp_path: Path) -> None:
    config = small_config(tmp_path / "model")
    async with running(config, tmp_path) as cluster:
        await serve(cluster)
        status = await cluster.gateway.idle()
        async with asyncio.timeout(40):
            while status.iteration_log.num_requests < NUM_REQUESTS * (
                NUM_TOKENS - 1
            ):  # the first is the prefill worker's
                await asyncio.sleep(0.05)
                status = await cluster.gateway.idle()
        path = cluster.iteration_log_path("decode-0")
        assert not path.exists()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == status.iteration_log.num_iterations
    assert sum(line["batch_size"] for line in lines) == status.iteration_log.num_requests
