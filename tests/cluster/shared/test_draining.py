"""Ends and restarts under load: what runs is finished, what comes is refused or waits, nothing fails."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.batch_jobs import BatchJob, check_answers, submit, wait_for
from tests.cluster.serving import COMMAND, EXACT, Serving, serving, token_prompts
from tests.cluster.streams import Stream, all_started, check_whole, make_client, stream_all, stream_one, streams_through

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 400
NUM_LINES = 400
PROMPTS = token_prompts(8, max_len=40)
BODY = {"model": "model", "prompt": [5, 6, 7], "max_tokens": 4}


async def ordered(cluster: Serving, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Give the command on this cluster, and wait for its end."""
    environment = os.environ | {"ALIGNEDSERVE_RUN_DIR": str(cluster.run_dir)}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=400, check=False
        )

    return await asyncio.to_thread(run)


async def stream_again_and_again(url: str, prompt: list[int], into: list[Stream], is_over: asyncio.Event) -> None:
    """Ask for one answer after the other, until it is over."""
    async with make_client(url) as client:
        while not is_over.is_set():
            into.append(Stream())
            await stream_one(client, prompt, NUM_TOKENS, into[-1])


async def restart_under_load(cluster: Serving, right: list[Stream]) -> subprocess.CompletedProcess[str]:
    """Restart the workers while every prompt is asked again and again; each answer must be whole and right."""
    former = {process.pid for process in cluster.actors("ColocatedWorker")}
    answers: list[list[Stream]] = [[] for _ in PROMPTS]
    is_over = asyncio.Event()
    load = [
        asyncio.create_task(stream_again_and_again(cluster.url, prompt, into, is_over))
        for prompt, into in zip(PROMPTS, answers, strict=True)
    ]
    done = await ordered(cluster, "restart", "--within", "2")
    is_over.set()
    await asyncio.gather(*load)
    assert done.returncode == 0, done.stderr
    assert former.isdisjoint(process.pid for process in cluster.actors("ColocatedWorker"))
    for streams, one in zip(answers, right, strict=True):
        check_whole(streams, [one] * len(streams))
    print(done.stderr, sum(map(len, answers)), "answers")
    return done


async def test_two_workers_are_restarted_under_load_and_nothing_fails(cluster: Serving) -> None:
    right = await stream_all(cluster.url, PROMPTS, NUM_TOKENS)
    done = await restart_under_load(cluster, right)
    assert done.stdout == "2 workers were restarted, one after the other.\n"


async def test_the_only_worker_is_restarted_and_a_drain_loses_nothing(tmp_path: Path, random_model: Path) -> None:
    """Streams that are open are answered whole, requests that come are sent elsewhere, lines go back to their batch."""
    own = ("gateway.drain_s=300", "batches.max_in_flight=4", f"batches.folder={tmp_path / 'batches'}")
    options = (str(random_model), *EXACT, *(part for setting in own for part in ("--set", setting)))
    with serving(tmp_path / "run", *options) as cluster:
        cluster.wait_ready()
        right = await stream_all(cluster.url, PROMPTS, NUM_TOKENS)
        done = await restart_under_load(cluster, right)
        assert done.stdout == "1 worker was restarted.\n"
        batch = await asyncio.to_thread(submit, cluster.url, NUM_LINES)
        await asyncio.to_thread(wait_for, cluster, batch, 4)
        streams = [Stream() for _ in PROMPTS]
        reading = asyncio.create_task(streams_through(cluster.url, PROMPTS, streams, NUM_TOKENS))
        await check_drain(cluster, streams, batch)
        await reading
        check_whole(streams, right)
        code, _, err = cluster.finish()
        assert (code, err.splitlines()[-1], cluster.leftovers()) == (0, "Stopping …", [])
        assert f"Draining: {len(PROMPTS)} requests go on for at most 300 s" in err
    with serving(tmp_path / "run", *options) as following:
        following.wait_ready()
        await asyncio.to_thread(check_answers, following, batch._replace(url=following.url))


async def check_drain(cluster: Serving, streams: list[Stream], batch: BatchJob) -> None:
    """Tell it to end while these streams and a batch run, and check what it says from then on."""
    await all_started(streams)
    assert batch.seen()["request_counts"]["completed"] < NUM_LINES
    cluster.send_signal(signal.SIGTERM)
    async with make_client(cluster.url) as client:
        while (ready := await client.get("/ready")).status_code == 200:  # noqa: ASYNC110  (another process closes the door)
            await asyncio.sleep(0.02)
        refused, health = await client.post("/v1/completions", json=BODY), await client.get("/health")
    assert (ready.status_code, ready.json()["error"]["message"]) == (503, "Not ready: draining.")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert int(refused.headers["retry-after"]) > 0
    assert refused.headers["connection"] == "close"
    assert health.status_code == 200
