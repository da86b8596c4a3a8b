"""A decode worker of another node takes batches out of a pool that no worker beside it can serve, over a connection."""

import asyncio
import logging
from pathlib import Path

import pytest

from alignedserve.core.request import SamplingParams
from alignedserve.worker_core import block_peers
from alignedserve.worker_core.service import Worker
from tests.harnesses.clusters.in_process import small_config
from tests.harnesses.clusters.two_nodes import FAR, start_two_nodes
from tests.support.samples import POOL
from tests.support.waiting import holds

pytestmark = pytest.mark.slow


async def test_requests_of_a_pool_without_decode_workers_are_served_from_another_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cluster = await start_two_nodes(small_config(tmp_path / "model"), tmp_path, has_tls=False)
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    prompts = [[3 + number, 5, 7, 11 * number + 13, 17] for number in range(6)]
    try:
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*(cluster.gateway.generate(prompt, sampling) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [cluster.reference(prompt, sampling) for prompt in prompts]
        assert "are reached by tcp" in caplog.text
    finally:
        await cluster.close()


async def test_the_link_to_another_node_is_there_while_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await start_two_nodes(small_config(tmp_path / "model"), tmp_path, has_tls=True)
    decoder = cluster.components[FAR]
    assert isinstance(decoder, Worker)

    def linked() -> set[str]:
        return {peer.name for peer in decoder._driver.links.peers()} - {"router", "gateway-0"}

    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    try:
        assert linked() == set()
        for number in range(3):
            prompt = [3 + number, 5, 7, 17]
            async with asyncio.timeout(30):
                answer = await cluster.gateway.generate(prompt, sampling)
            assert answer.token_ids == cluster.reference(prompt, sampling)
            assert linked() == {POOL}
            with monkeypatch.context() as minute:
                minute.setattr(block_peers, "LINK_IDLE_S", 0.0)  # it is over
                await holds(lambda: linked() == set())
    finally:
        await cluster.close()
