"""The state of a cluster, by its metrics and logs."""

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_ZEROS = (
    "alignedserve_pool_blocks_used",
    "alignedserve_worker_blocks_used",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)


def ask(url: str, path: str, body: Any = None, timeout_s: float = 5.0) -> tuple[int, str]:
    """Return status and body of one answer of the gateway; status 0 without one."""
    content = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "connection": "close"}
    request = urllib.request.Request(url + path, content, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""


def held_by(url: str) -> dict[str, float]:
    """Return what is in use though nothing runs: blocks and requests by metric; empty where nothing is."""
    status, text = ask(url, "/metrics")
    if status != 200:
        return {"no metrics": float(status)}
    values = dict.fromkeys(_ZEROS, -1.0)
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in values:
            values[name] = max(values[name], 0.0) + float(line.rpartition(" ")[2])
    return {name: value for name, value in values.items() if value}


def tail_of(folder: Path) -> str:
    """Return the last lines of every log."""
    lines = []
    for path in sorted(folder.glob("*.log")):
        lines += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-6:]]
    return "\n".join(lines)
