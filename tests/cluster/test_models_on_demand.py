"""Models that do not fit at once share a served cluster's memory: chats and a batch are answered whole."""

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from alignedserve.cluster.deployments.admin_api import SOCKET_NAME, ask, show
from alignedserve.config.sections import MIB
from tests.cluster.serving import serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

_PATIENCE_S = 200.0


def _states(run_dir: Path) -> dict[str, str]:
    (door,) = run_dir.glob(f"*/{SOCKET_NAME}")
    return {one.name: one.phase for one in show(partial(ask, door)).deployments}


def _ask(url: str, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "spell otter"}], "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=_PATIENCE_S)


def _submit(url: str, models: list[str]) -> str:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": [{"role": "user", "content": "spell otter"}], "temperature": 0},
        }
        for number, model in enumerate(models)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    uploaded = httpx.post(
        f"{url}/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)}, timeout=60
    )
    body = {
        "input_file_id": uploaded.raise_for_status().json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "1h",
    }
    return str(httpx.post(f"{url}/v1/batches", json=body, timeout=60).raise_for_status().json()["id"])


def _finished(url: str, batch_id: str) -> list[dict[str, Any]]:
    ends_s = time.monotonic() + _PATIENCE_S
    while (batch := httpx.get(f"{url}/v1/batches/{batch_id}", timeout=60).json())["status"] != "completed":
        assert time.monotonic() < ends_s, batch
        time.sleep(0.1)
    content = httpx.get(f"{url}/v1/files/{batch['output_file_id']}/content", timeout=60).text
    return [json.loads(line) for line in content.splitlines()]


def test_two_models_that_do_not_fit_at_once_answer_both(tmp_path: Path) -> None:
    # Untouched pages of a cache take no memory, but count as held.
    cache = f"decode.kv_cache_bytes={psutil.virtual_memory().available * 6 // 10 // MIB}MiB"
    config = tmp_path / "models.yaml"
    config.write_text(
        "models:\n"
        "- model: {path: pocket, served_model_name: a, keep_alive: 1h, aliases: [first]}\n"
        "- model: {path: pocket, served_model_name: b, keep_alive: 1h}\n"
    )
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    with serving(run_dir, "--config", str(config), "--set", cache) as served:
        served.wait_ready()
        url = f"http://127.0.0.1:{served.port}"
        ends_s = time.monotonic() + 60.0
        while not list(run_dir.glob(f"*/{SOCKET_NAME}")):
            assert time.monotonic() < ends_s
            time.sleep(0.1)
        assert _states(run_dir) == {"a": "serving", "b": "asleep"}
        assert _ask(url, "first").json()["choices"][0]["message"]["content"] == "o t t e r"

        statuses: list[int] = []
        asking = threading.Thread(target=lambda: statuses.append(_ask(url, "b").status_code))
        asking.start()
        streamed = _ask(url, "b", stream=True)  # waits in line until `a`, which nobody uses, has left
        asking.join()
        assert (streamed.status_code, statuses) == (200, [200])
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert _states(run_dir) == {"b": "serving", "a": "asleep"}

        lines = _finished(url, _submit(url, ["a"] * 4))  # which has `a` loaded again
        assert sorted(line["custom_id"] for line in lines) == sorted(f"line-{number}" for number in range(4))
        answers = {line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
        assert answers == {"o t t e r"}
        code, _, err = served.stop()
        assert (code, served.leftovers(), served.arenas()) == (0, [], []), err
