"""A batch that is under way while something is lost, and what must have come of it."""

import json
from typing import Any

import httpx

from tests.cluster.ray_nodes import RayNodes
from tests.cluster.serving import MODEL

NUM_LINES = 60


def make_batch(url: str) -> str:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": [5, 6, 7 + number], "max_tokens": 40, "temperature": 0},
        }
        for number in range(NUM_LINES)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    with httpx.Client(base_url=url, timeout=60.0) as client:
        upload = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)})
        assert upload.status_code == 200, upload.text
        body = {"input_file_id": upload.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(client.post("/v1/batches", json=body).raise_for_status().json()["id"])


def check_batch(nodes: RayNodes, url: str, batch: str) -> None:
    with httpx.Client(base_url=url, timeout=60.0) as client:

        def seen() -> dict[str, Any]:
            return dict(client.get(f"/v1/batches/{batch}").json())

        nodes.wait(lambda: seen()["status"] == "completed", seen)
        output = client.get(f"/v1/files/{seen()['output_file_id']}/content").raise_for_status().text
    ids = [json.loads(line)["custom_id"] for line in output.splitlines()]
    assert sorted(ids) == sorted(f"line-{number}" for number in range(NUM_LINES))
