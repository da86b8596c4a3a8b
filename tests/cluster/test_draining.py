"""Ends and restarts under load: what runs is finished, what comes is refused or waits, nothing fails."""

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.cluster.serving import COMMAND, EXACT, Serving, serving, token_prompts
from tests.cluster.streams import Stream, all_started, check_whole, make_client, stream_all, stream_one, streams_through

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 400
BODY = {"model": "model", "prompt": [5, 6, 7], "max_tokens": 4}


async def drained(cluster: Serving, client: httpx.AsyncClient, streams: list[Stream]) -> list[httpx.Response]:
    """Tell it to end while these streams run; return what it says from then on of /ready and of a request."""
    await all_started(streams)
    cluster.send_signal(signal.SIGTERM)
    while (ready := await client.get("/ready")).status_code == 200:  # noqa: ASYNC110  (another process closes the door)
        await asyncio.sleep(0.02)
    return [ready, await client.post("/v1/completions", json=BODY), await client.get("/health")]


async def test_what_is_open_is_answered_whole_and_what_comes_is_sent_elsewhere(
    tmp_path: Path, random_model: Path
) -> None:
    with serving(tmp_path / "run", str(random_model), *EXACT, "--set", "gateway.drain_s=300") as cluster:
        cluster.wait_ready()
        prompts = token_prompts(8, max_len=40)
        right = await stream_all(cluster.url, prompts, NUM_TOKENS)
        streams = [Stream() for _ in prompts]
        reading = asyncio.create_task(streams_through(cluster.url, prompts, streams, NUM_TOKENS))
        async with make_client(cluster.url) as client:
            ready, refused, health = await drained(cluster, client, streams)
        await reading
        check_whole(streams, right)
        assert (ready.status_code, ready.json()["error"]["message"]) == (503, "Not ready: draining.")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        assert health.status_code == 200
        code, _, err = cluster.finish()
        assert (code, err.splitlines()[-1], cluster.leftovers()) == (0, "Stopping …", [])
        assert "Draining: 8 requests go on for at most 300 s" in err


async def test_a_second_signal_ends_what_runs(tmp_path: Path, random_model: Path) -> None:
    with serving(tmp_path / "run", str(random_model), *EXACT, "--set", "gateway.drain_s=3000") as cluster:
        cluster.wait_ready()
        streams = [Stream()]
        reading = asyncio.create_task(streams_through(cluster.url, [[5, 6, 7]], streams, 2000))
        await all_started(streams)
        cluster.actor("ColocatedWorker").suspend()  # so that it cannot end by itself
        async with make_client(cluster.url) as client:
            await drained(cluster, client, streams)
        code, _, err = cluster.stop(signal.SIGTERM)
        await reading
        assert (code, err.splitlines()[-1], cluster.leftovers()) == (0, "Stopping …", [])
        assert not streams[0].is_done


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


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_workers_are_restarted_under_load_and_nothing_fails(
    tmp_path: Path, random_model: Path, num_workers: int
) -> None:
    options = (*EXACT, "--set", f"decode.count={num_workers}")
    with serving(tmp_path / "run", str(random_model), *options) as cluster:
        cluster.wait_ready()
        prompts = token_prompts(6, max_len=40)
        right = await stream_all(cluster.url, prompts, NUM_TOKENS)
        former = {process.pid for process in cluster.actors("ColocatedWorker")}
        answers: list[list[Stream]] = [[] for _ in prompts]
        is_over = asyncio.Event()
        load = [
            asyncio.create_task(stream_again_and_again(cluster.url, prompt, into, is_over))
            for prompt, into in zip(prompts, answers, strict=True)
        ]
        done = await ordered(cluster, "restart", "--within", "2")
        is_over.set()
        await asyncio.gather(*load)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{num_workers} workers were restarted, one after the other.\n"
        assert former.isdisjoint(process.pid for process in cluster.actors("ColocatedWorker"))
        for streams, one in zip(answers, right, strict=True):
            check_whole(streams, [one] * len(streams))
        print(done.stderr, sum(map(len, answers)), "answers")


async def test_lines_go_back_to_their_batch_and_the_next_cluster_goes_on(tmp_path: Path, random_model: Path) -> None:
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions",
         "body": {"model": "model", "prompt": [5, 6, number + 10], "max_tokens": 300, "ignore_eos": True}}
        for number in range(40)
    ]  # fmt: skip
    options = (*EXACT, "--set", "batches.max_in_flight=4", "--set", f"batches.folder={tmp_path / 'batches'}")
    with serving(tmp_path / "run", str(random_model), *options) as cluster:
        cluster.wait_ready()
        async with make_client(cluster.url) as client:
            content = "".join(json.dumps(line) + "\n" for line in lines).encode()
            file = await client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
            asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = (await client.post("/v1/batches", json=asked)).json()["id"]
            while (found := (await client.get(f"/v1/batches/{batch}")).json())["request_counts"]["completed"] < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert cluster.stop(signal.SIGTERM)[0] == 0
        assert found["request_counts"]["completed"] < 40
        with serving(tmp_path / "run", str(random_model), *options) as following:
            following.wait_ready()
            async with make_client(following.url) as client:
                while (found := (await client.get(f"/v1/batches/{batch}")).json())["status"] != "completed":
                    assert found["status"] in ("in_progress", "validating", "finalizing")
                    await asyncio.sleep(0.1)
            assert found["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
