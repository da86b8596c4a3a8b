"""A disk that is full for a while, for real: nothing is corrupted, batches say so and go on by themselves."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.batches.kills import Verdict, answered_alone, judge, make_tasks
from benchmarks.measuring.batch_client import BatchHttpClient, chat_file
from benchmarks.measuring.kill_cluster import kill_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.promise]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return ballast


def stored_response(url: str) -> httpx.Response:
    """Ask for an answer that is stored."""
    return httpx.post(f"{url}/v1/responses", json={"model": "pocket", "input": "spell otter"}, timeout=60.0)


def test_a_batch_on_a_full_disk_pauses_and_goes_on(small_disk: Path, tmp_path: Path) -> None:
    with kill_cluster(tmp_path) as cluster:
        client = BatchHttpClient(cluster.url)
        tasks = answered_alone(client, make_tasks(480), 400)
        prompts = [(name, task.prompt) for name, task in tasks.items()]
        batch_id = client.submit(chat_file(prompts, "pocket"), "/v1/chat/completions")
        client.wait(batch_id, lambda batch: batch["request_counts"]["completed"] > 20)
        kept = stored_response(cluster.url).json()["id"]
        ballast = fill(small_disk)
        refused = stored_response(cluster.url)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "storage_full"
        assert "no space left on the disk" in refused.json()["error"]["message"]
        assert httpx.get(f"{cluster.url}/v1/responses/{kept}").status_code == 200
        time.sleep(6.0)
        waiting = client.batch(batch_id)
        assert waiting["status"] == "in_progress"
        assert "no space left" in waiting["alignedserve"]["paused"]
        assert "alignedserve_batches_paused 1" in httpx.get(f"{cluster.url}/metrics").text
        ballast.unlink()
        assert stored_response(cluster.url).status_code == 200
        batch = client.wait(batch_id)
        output = client.lines(batch.get("output_file_id"))
        assert judge(batch, output, client.lines(batch.get("error_file_id")), tasks) == Verdict(0, 0, 0, "completed")
