"""`alignedserve serve --engine vllm` over real vLLMs, of which some are killed; skipped without `make test-vllm`."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.ports import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
VLLM = Path(os.environ.get("VLLM_COMMAND", ROOT / "build" / "vllm" / "bin" / "vllm"))
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
ARGUMENTS = f"--dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 16 --chat-template '{TEMPLATE}'"
FOR_CPUS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "w5 w6 w7"}], "temperature": 0, "ignore_eos": True}
NUM_LINES = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not VLLM.exists(), reason="no vLLM: make test-vllm"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, int]]:
    folder = tmp_path_factory.mktemp("served")
    made = (
        "from tests.inside_vllm.tiny_model import *; import sys, pathlib; make_model(pathlib.Path(sys.argv[1]), **TINY)"
    )
    subprocess.run([VLLM.parent / "python", "-c", made, folder / "model"], check=True, cwd=ROOT)
    port, log = free_port(), folder / "log"
    command = [
        *(sys.executable, "-m", "alignedserve", "serve", "--engine", str(VLLM), f"tiny={folder / 'model'}"),
        *("--engine-count", "2", "--engine-args", ARGUMENTS, "--port", str(port)),
        *("--set", f"batches.folder={folder / 'batches'}"),
    ]
    with log.open("w") as file:
        environment = {**os.environ, **FOR_CPUS, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
            _until(lambda: _is_ready(client, process, log), 400.0)
            yield client, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)
        print(log.read_text()[-3000:])
    assert not _engines(process.pid)


def _is_ready(client: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-4000:]
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def _until(holds: Callable[[], bool], seconds: float) -> None:
    wait_until(holds, seconds, lambda: "it took too long", 0.2)


def _engines(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def test_a_chat_is_answered_and_told_to_the_edge(served: tuple[httpx.Client, int]) -> None:
    client, _ = served
    answer = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 5})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 5
    refused = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 5, "temperature": -3})
    assert refused.status_code == 400


def test_streams_end_once_when_an_engine_is_killed_and_it_comes_back(served: tuple[httpx.Client, int]) -> None:
    client, pid = served
    ends: list[str] = []

    def stream() -> None:
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 900, "stream": True}) as answer:
            ends.append("".join(answer.iter_text()))

    streams = [threading.Thread(target=stream) for _ in range(6)]
    for thread in streams:
        thread.start()
    time.sleep(1.5)
    before = _engines(pid)
    os.kill(before[0], signal.SIGKILL)
    for thread in streams:
        thread.join(120)
    errors = [text for text in ends if '"error"' in text]
    assert len(ends) == 6
    assert all(text.count('"error"') + text.count("[DONE]") >= 1 for text in ends)
    assert all(text.count('"error":') == 1 for text in errors)
    assert 1 <= len(errors) <= 5
    _until(lambda: len(_engines(pid)) == 2 and before[0] not in _engines(pid), 30.0)
    assert client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 5}).status_code == 200


def test_every_line_of_a_batch_is_answered_once_when_an_engine_is_killed(served: tuple[httpx.Client, int]) -> None:
    client, pid = served
    line = {"method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "max_tokens": 60}}
    text = "\n".join(json.dumps({"custom_id": f"l{number}", **line}) for number in range(NUM_LINES))
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", text)}).json()
    job = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=job).json()
    _until(lambda: client.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] > 5, 120.0)
    os.kill(_engines(pid)[0], signal.SIGKILL)  # the eldest: it answers; another may still be on its way back
    _until(lambda: client.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed", 400.0)
    done = client.get(f"/v1/batches/{batch['id']}").json()
    lines = client.get(f"/v1/files/{done['output_file_id']}/content").text.splitlines()
    assert sorted(re.findall(r'"custom_id":\s*"(l\d+)"', "\n".join(lines))) == sorted(f"l{n}" for n in range(NUM_LINES))
    assert all(json.loads(each)["response"]["status_code"] == 200 for each in lines)
