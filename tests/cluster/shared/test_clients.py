"""Clients of a served cluster that leave in the middle, are too many, or come without a key."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from tests.cluster.serving import EXACT, Serving, serving, token_prompts
from tests.cluster.streams import Stream, make_client, stream_one

pytestmark = [pytest.mark.slow, pytest.mark.promise, pytest.mark.cluster, pytest.mark.timeout(400)]


async def test_clients_that_leave_free_their_blocks(cluster: Serving) -> None:
    streams = [Stream() for _ in range(6)]
    prompts = token_prompts(6, seed=1)
    async with make_client(cluster.url) as client:
        pairs = zip(prompts, streams, strict=True)
        tasks = [asyncio.create_task(stream_one(client, prompt, 1500, stream)) for prompt, stream in pairs]
        await asyncio.gather(*(stream.started.wait() for stream in streams))
        await asyncio.to_thread(cluster.wait_for, "alignedserve_worker_blocks_used", lambda count: count > 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not any(stream.is_done for stream in streams)
    await asyncio.to_thread(cluster.wait_idle)
    _, metrics = cluster.get("/metrics")
    aborted = [line for line in metrics.splitlines() if line.startswith("vllm:request_success") and '"abort"' in line]
    assert sum(float(line.rpartition(" ")[2]) for line in aborted) >= len(streams)


@pytest.mark.slow
async def test_overload_keys_and_quotas(tmp_path: Path, random_model: Path) -> None:
    limits = (
        "router.max_queued_requests=4",
        "decode.max_running_requests=4",
        "decode.max_waiting_requests=0",
        "gateway.requests_per_minute=50",
    )
    options = [*EXACT, *(part for limit in limits for part in ("--set", limit))]
    environment = {"ALIGNEDSERVE_API_KEYS": "first-key,second-key"}
    with serving(tmp_path / "run", str(random_model), *options, environment=environment) as cluster:
        cluster.wait_ready()
        async with make_client(cluster.url) as client:
            await refuse_without_a_key(client)
            client.headers["authorization"] = "Bearer first-key"
            await overload(client)
            client.headers["authorization"] = "Bearer second-key"
            await exceed_the_quota(client)
        code, _, err = cluster.stop()
        assert (code, cluster.leftovers()) == (0, []), err


async def refuse_without_a_key(client: httpx.AsyncClient) -> None:
    for key in (None, "Bearer wrong", "Basic first-key"):
        headers = {"authorization": key} if key else {}
        refused = await client.get("/v1/models", headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"


async def overload(client: httpx.AsyncClient) -> None:
    prompts = [[7] * 600 for _ in range(40)]
    answers = await asyncio.gather(*(stream_one(client, prompt, 20, Stream()) for prompt in prompts))
    refused = [answer for answer in answers if answer.status == 503]
    assert refused
    assert all(int(answer.retry_after or 0) >= 1 for answer in refused)
    served = [answer for answer in answers if answer.status == 200]
    assert len(served) >= 4
    assert len(served) + len(refused) == len(answers)
    assert all(answer.is_done and answer.error is None for answer in served)


async def exceed_the_quota(client: httpx.AsyncClient) -> None:
    began_s, num_admitted = time.monotonic(), 0
    while (beyond := await stream_one(client, [5], 1, Stream())).status == 200:
        num_admitted += 1
    elapsed_s = time.monotonic() - began_s
    assert beyond.status == 429
    assert 50 <= num_admitted <= 51 + 50 * elapsed_s / 60  # as many come back in a minute
    assert int(beyond.retry_after or 0) >= 1
