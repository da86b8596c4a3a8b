"""Batches on a real cluster: whatever is killed, every line ends once, with the answer that it has alone."""

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.serving import EXACT, MODEL, Serving, serving

pytestmark = pytest.mark.cluster

NUM_LINES = 300
_PATIENCE_S = 120.0


def post(cluster: Serving, path: str, body: bytes, content_type: str = "application/json") -> dict[str, Any]:
    request = urllib.request.Request(cluster.url + path, body, {"content-type": content_type})
    with urllib.request.urlopen(request, timeout=30.0) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def submit(cluster: Serving, num_lines: int) -> str:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": [5, 6, 7 + number % 5], "max_tokens": 8, "temperature": 0},
        }
        for number in range(num_lines)
    ]
    parts = [b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n']
    parts.append(b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n')
    parts.append(b"\n".join(json.dumps(line).encode() for line in lines) + b"\r\n--b--\r\n")
    file = post(cluster, "/v1/files", b"".join(parts), "multipart/form-data; boundary=b")
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    return str(post(cluster, "/v1/batches", json.dumps(asked).encode())["id"])


def wait_for(cluster: Serving, batch_id: str, num_completed: int) -> dict[str, Any]:
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        status, text = cluster.get(f"/v1/batches/{batch_id}")
        if status == 200:
            batch: dict[str, Any] = json.loads(text)
            if batch["request_counts"]["completed"] >= num_completed or batch["status"] == "completed":
                return batch
        time.sleep(0.1)
    raise AssertionError(f"{batch_id}: {cluster.get(f'/v1/batches/{batch_id}')}\n{cluster.logs()}")


def check_results(cluster: Serving, batch: dict[str, Any]) -> None:
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    status, text = cluster.get(f"/v1/files/{batch['output_file_id']}/content")
    assert status == 200
    results = [json.loads(line) for line in text.splitlines()]
    assert sorted(one["custom_id"] for one in results) == sorted(f"line-{number}" for number in range(NUM_LINES))
    alone = [cluster.complete((5, 6, 7 + kind), max_tokens=8)[1]["choices"][0]["text"] for kind in range(5)]
    for one in results:
        number = int(one["custom_id"].removeprefix("line-"))
        assert one["response"]["body"]["choices"][0]["text"] == alone[number % 5]


def test_a_batch_whose_driver_and_redis_are_killed(cluster: Serving) -> None:
    batch_id = submit(cluster, NUM_LINES)
    wait_for(cluster, batch_id, 20)
    cluster.actor("Batch").kill()
    wait_for(cluster, batch_id, 100)
    cluster.redis().kill()
    wait_for(cluster, batch_id, 180)
    cluster.actor("Gateway").kill()
    check_results(cluster, wait_for(cluster, batch_id, NUM_LINES + 1))


@pytest.mark.slow
def test_a_driver_that_is_stopped_for_ever_is_replaced(tmp_path: Path, random_model: Path) -> None:
    options = (str(random_model), *EXACT, "--set", "links.hang_timeout_s=3")
    with serving(tmp_path / "run", *options) as cluster:
        cluster.wait_ready()
        batch_id = submit(cluster, NUM_LINES)
        wait_for(cluster, batch_id, 20)
        cluster.actor("Batch").suspend()
        check_results(cluster, wait_for(cluster, batch_id, NUM_LINES + 1))
