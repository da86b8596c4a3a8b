"""A decode worker of another node takes batches out of a pool that no worker beside it can serve, over a connection."""

import asyncio
import logging
from pathlib import Path

import pytest

from alignedserve.core.request import SamplingParams
from tests.support.in_process import small_config
from tests.support.two_nodes import start_two_nodes


@pytest.mark.parametrize("has_tls", [True, False])
async def test_requests_of_a_pool_without_decode_workers_are_served_from_another_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_tls: bool
) -> None:
    caplog.set_level(logging.INFO)
    cluster = await start_two_nodes(small_config(tmp_path / "model"), tmp_path, has_tls=has_tls)
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    prompts = [[3 + number, 5, 7, 11 * number + 13, 17] for number in range(6)]
    try:
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*(cluster.gateway.generate(prompt, sampling) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [cluster.reference(prompt, sampling) for prompt in prompts]
        assert "are reached by tcp" in caplog.text
    finally:
        await cluster.close()
