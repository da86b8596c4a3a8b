"""`vllm serve` with our scheduler: objectives, refusals and counters over HTTP."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.inside_vllm.tiny_model import TINY, make_model

ROOT = Path(__file__).parents[2]
PORT = 8179
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_model(tmp_path_factory.mktemp("model"), **TINY)
    command = [
        *(str(Path(sys.executable).parent / "vllm"), "serve", str(folder), "--served-model-name", "tiny"),
        *("--port", str(PORT), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
        *("--scheduling-policy", "priority", "--scheduler-cls", "alignedserve_vllm.AlignedScheduler"),
        *("--additional-config", '{"alignedserve": {"slo_ttft_ms": 2000}}'),
    ]
    log = tmp_path_factory.mktemp("log") / "server.log"
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        for _ in range(300):
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://localhost:{PORT}/health", timeout=2)
                break
            except OSError:
                time.sleep(1)
        yield f"http://localhost:{PORT}"
    finally:
        process.terminate()
        process.wait(60)


def complete(url: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def counters(url: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("alignedserve_scheduler_")]
    return {name.partition("{")[0].removeprefix("alignedserve_scheduler_"): float(value) for name, value in rows}


@pytest.mark.timeout(400)
def test_serves_chats_and_documents_and_counts_them(server: str) -> None:
    assert complete(server)[0] == 200
    assert complete(server, vllm_xargs={"slo_ttft_ms": 900, "slo_tpot_ms": 200, "tenant": "a"})[0] == 200
    assert complete(server, vllm_xargs={"service_class": "document", "deadline_ms": 60000})[0] == 200
    assert complete(server, priority=5)[0] == 200
    seen = counters(server)
    assert (seen["chats_total"], seen["documents_total"], seen["bad_terms_total"]) == (2, 2, 0)
    assert seen["steps_total"] > 0
    assert seen["plain_steps_total"] == 0


@pytest.mark.parametrize(
    ("xargs", "text"),
    [
        ({"slo_ttft_ms": "fast"}, "vllm_xargs.slo_ttft_ms must be a number of milliseconds above 0"),
        ({"slo_tpot_ms": -1}, "vllm_xargs.slo_tpot_ms must be"),
        ({"slo_ttft_ms": 1e30}, "at most 3600000"),
        ({"service_class": "gold"}, "must be one of chat, document"),
        ({"service_class": "document", "slo_ttft_ms": 77}, "a document has deadline_ms alone"),
        ({"tenant": "t" * 300}, "at most 256 letters"),
    ],
)
def test_refuses_terms_without_meaning(server: str, xargs: dict[str, Any], text: str) -> None:
    status, answer = complete(server, vllm_xargs=xargs)
    assert status == 400
    message = answer["error"]["message"]
    assert text in message
    assert not any(str(value) in message for value in xargs.values() if value != "document")
