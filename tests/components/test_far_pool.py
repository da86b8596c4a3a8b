"""A decode worker of another node takes batches out of a pool that no worker beside it can serve, over a connection."""

import asyncio
import logging
from pathlib import Path

import pytest

from alignedserve.core.request import SamplingParams
from alignedserve.runtime.process.addresses import AddressBook
from tests.contract.test_links_by_name import SharedDirectory
from tests.support.in_process import RoomCluster, small_config

FAR = "decode-9"


async def test_requests_of_a_pool_without_decode_workers_are_served_from_another_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = small_config(tmp_path / "model")
    (tmp_path / "far").mkdir()
    directory = SharedDirectory()
    cluster = RoomCluster(config, tmp_path)
    cluster.addresses = AddressBook(tmp_path, "node-0", "127.0.0.1", directory, has_tls=False)
    cluster.books[FAR] = AddressBook(tmp_path / "far", "node-1", "127.0.0.1", directory, has_tls=False)
    cluster.pools[FAR] = "pool-9"  # never there: a node with decode workers alone
    await cluster.start_router()
    await cluster.start_pool()
    await cluster.start_prefill("prefill-0")
    await cluster.gateway.start()
    await asyncio.sleep(0.3)  # the prefill worker has mapped the arena, which other hosts do not see
    cluster.arena_path.unlink()
    await cluster.start_decode(FAR)
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    prompts = [[3 + number, 5, 7, 11 * number + 13, 17] for number in range(6)]
    try:
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*(cluster.gateway.generate(prompt, sampling) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [cluster.reference(prompt, sampling) for prompt in prompts]
        assert "are reached by tcp" in caplog.text
    finally:
        await cluster.close()
