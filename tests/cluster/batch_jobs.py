"""Batches on a served cluster: submitted, followed, and their results compared with what each line gets alone."""

import json
import time
import urllib.request
from typing import Any

from tests.cluster.serving import MODEL, Serving

NUM_LINES = 300
_PATIENCE_S = 120.0


def _post(cluster: Serving, path: str, body: bytes, content_type: str = "application/json") -> dict[str, Any]:
    request = urllib.request.Request(cluster.url + path, body, {"content-type": content_type})
    with urllib.request.urlopen(request, timeout=30.0) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def submit(cluster: Serving) -> str:
    """Upload NUM_LINES lines and start a batch of them; return its id."""
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": [5, 6, 7 + number % 5], "max_tokens": 8, "temperature": 0},
        }
        for number in range(NUM_LINES)
    ]
    parts = [b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n']
    parts.append(b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n')
    parts.append(b"\n".join(json.dumps(line).encode() for line in lines) + b"\r\n--b--\r\n")
    file = _post(cluster, "/v1/files", b"".join(parts), "multipart/form-data; boundary=b")
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    return str(_post(cluster, "/v1/batches", json.dumps(asked).encode())["id"])


def wait_for(cluster: Serving, batch_id: str, num_completed: int) -> dict[str, Any]:
    """Wait until so many lines are completed, or all."""
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
    """Check that every line ended once, with the answer that it has alone."""
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    status, text = cluster.get(f"/v1/files/{batch['output_file_id']}/content")
    assert status == 200
    results = [json.loads(line) for line in text.splitlines()]
    assert sorted(one["custom_id"] for one in results) == sorted(f"line-{number}" for number in range(NUM_LINES))
    alone = [cluster.complete((5, 6, 7 + kind), max_tokens=8)[1]["choices"][0]["text"] for kind in range(5)]
    for one in results:
        number = int(one["custom_id"].removeprefix("line-"))
        assert one["response"]["body"]["choices"][0]["text"] == alone[number % 5]
