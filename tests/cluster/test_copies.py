"""Copies in the pool while requests decode, and the paths of blocks between workers, in a served cluster."""

import asyncio
from pathlib import Path

import pytest

from tests.cluster.serving import EXACT, Serving, serving, token_prompts
from tests.cluster.streams import Stream, make_client, stream_all, stream_one

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPTS = token_prompts(6, max_len=400)
MAX_TOKENS = 800  # seconds of decoding: copies, evictions and their counts must come before the end
BLOCK_BYTES = 80 * 1024  # of the shipped model's shape: five layers, two times 128 numbers, sixteen tokens
REUSED, EVICTIONS, KEPT = (
    "alignedserve_reused_tokens_total",
    "alignedserve_evictions_total",
    "alignedserve_pool_blocks_kept",
)


@pytest.fixture(scope="module")
def undisturbed(shared_cluster: Serving) -> list[str]:
    """The answers with room for all."""
    streams = asyncio.run(stream_all(shared_cluster.url, PROMPTS, MAX_TOKENS))
    assert all(stream.is_done and stream.error is None for stream in streams), streams
    return [stream.text for stream in streams]


async def test_after_a_decode_worker_is_killed_requests_go_on_from_the_pools_copies(
    separate_cluster: Serving, undisturbed: list[str]
) -> None:
    cluster = separate_cluster
    before = cluster.metrics()[REUSED]
    streams = [Stream() for _ in PROMPTS]
    async with make_client(cluster.url) as client:
        pairs = zip(PROMPTS, streams, strict=True)
        tasks = [asyncio.create_task(stream_one(client, prompt, MAX_TOKENS, stream)) for prompt, stream in pairs]
        await asyncio.gather(*(stream.started.wait() for stream in streams))
        await asyncio.to_thread(cluster.wait_for, KEPT, lambda value: value > 0)
        cluster.actor("DecodeWorker").kill()
        await asyncio.gather(*tasks)
    assert [stream.text for stream in streams] == undisturbed
    await asyncio.to_thread(cluster.wait_for, REUSED, lambda value: value > before)
    cluster.wait_idle()


@pytest.mark.parametrize("transport", ["tcp", "gloo"])  # shm: the clusters of all other tests
async def test_evicted_requests_come_back_unchanged(
    undisturbed: list[str], tmp_path: Path, random_model: Path, transport: str
) -> None:
    """Half of the requests fit the decode worker at a time: they take turns, by way of the candidate buffers."""
    num_tokens = sum(len(prompt) + MAX_TOKENS for prompt in PROMPTS)
    settings = (
        "model.max_context_len=1280",
        f"engine.kv_transport={transport}",
        f"decode.kv_cache_bytes={num_tokens // 2 // 16 * BLOCK_BYTES}",
    )
    options = (str(random_model), *EXACT, *(part for setting in settings for part in ("--set", setting)))
    with serving(tmp_path / "tight", *options) as tight:
        tight.wait_ready()
        streams = await stream_all(tight.url, PROMPTS, MAX_TOKENS)
        tight.wait_idle()
        await asyncio.to_thread(tight.wait_for, EVICTIONS, lambda value: value > 0)
    assert all(stream.is_done and stream.error is None for stream in streams)
    assert [stream.text for stream in streams] == undisturbed
