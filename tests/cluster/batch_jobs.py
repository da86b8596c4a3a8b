"""Batches on a served cluster: submitted, followed while something is lost, and the results of every line."""

import json
import time
from typing import Any, NamedTuple

import httpx

from tests.cluster.ray_nodes import RayNodes
from tests.cluster.serving import MODEL, Serving

NUM_LINES = 300
_NUM_PROMPTS = 5
_NUM_TOKENS = 8
_PATIENCE_S = 120.0
_ANSWER_S = 60.0


class BatchJob(NamedTuple):
    """One batch, as the clients of a gateway see it."""

    url: str  # of the gateway
    batch_id: str
    num_lines: int

    def seen(self) -> dict[str, Any]:
        """Return its record; nothing while the gateway does not answer."""
        try:
            answer = httpx.get(f"{self.url}/v1/batches/{self.batch_id}", timeout=_ANSWER_S)
        except httpx.TransportError:
            return {}
        return dict(answer.json()) if answer.status_code == 200 else {}

    def results(self) -> dict[int, dict[str, Any]]:
        """Return the result of every line by its number. Checks that each has ended once."""
        output = httpx.get(f"{self.url}/v1/files/{self.seen()['output_file_id']}/content", timeout=_ANSWER_S)
        lines = [json.loads(line) for line in output.raise_for_status().text.splitlines()]
        found = {int(line["custom_id"].removeprefix("line-")): line for line in lines}
        assert sorted(found) == list(range(self.num_lines))
        assert len(lines) == self.num_lines
        return found


def submit(url: str, num_lines: int, *, num_prompts: int = _NUM_PROMPTS, max_tokens: int = _NUM_TOKENS) -> BatchJob:
    """Upload so many lines, which have so many prompts in turn, and start a batch of them."""
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": MODEL,
                "prompt": _prompt(number % num_prompts),
                "max_tokens": max_tokens,
                "temperature": 0,
            },
        }
        for number in range(num_lines)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    with httpx.Client(base_url=url, timeout=_ANSWER_S) as client:
        upload = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)})
        assert upload.status_code == 200, upload.text
        body = {"input_file_id": upload.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = client.post("/v1/batches", json=body).raise_for_status().json()["id"]
    return BatchJob(url, str(batch_id), num_lines)


def _prompt(kind: int) -> list[int]:
    return [5, 6, 7 + kind]


def wait_for(cluster: Serving, job: BatchJob, num_completed: int) -> None:
    """Wait until so many lines are completed, or all."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        seen = job.seen()
        if seen and (seen["request_counts"]["completed"] >= num_completed or seen["status"] == "completed"):
            return
        time.sleep(0.1)
    raise AssertionError(f"{job}: {job.seen()}\n{cluster.logs()}")


def check_answers(cluster: Serving, job: BatchJob) -> None:
    """Check that every line ends once, with the answer that it has alone."""
    wait_for(cluster, job, job.num_lines + 1)
    counts = {"total": job.num_lines, "completed": job.num_lines, "failed": 0}
    assert job.seen()["request_counts"] == counts
    alone = [
        cluster.complete(_prompt(kind), max_tokens=_NUM_TOKENS)[1]["choices"][0]["text"] for kind in range(_NUM_PROMPTS)
    ]
    for number, line in job.results().items():
        assert line["response"]["body"]["choices"][0]["text"] == alone[number % _NUM_PROMPTS]


def check_end(nodes: RayNodes, job: BatchJob) -> None:
    """Check that every line ends once."""
    nodes.wait(lambda: job.seen().get("status") == "completed", job.seen)
    job.results()
