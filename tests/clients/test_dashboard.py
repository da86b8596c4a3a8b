"""The live page in a real browser, while a model is served and answers."""

import json
import shutil
import threading
from pathlib import Path

import httpx
import pytest

from tests.clients.environments import HERE
from tests.clients.running import run_node_script
from tests.cluster.serving import Serving

_CHROMIUM = shutil.which("chromium")

pytestmark = [pytest.mark.clients, pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium on this machine")]


def _answer_until(ended: threading.Event, url: str) -> None:
    """Ask for one answer after another."""
    while not ended.is_set():
        body = {"model": "pocket", "prompt": "Spell cat. " * 20, "max_tokens": 64, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, headers={"x-slo-ttft-ms": "60000"}, timeout=60.0)


def test_the_live_page_shows_a_cluster_at_work(server: Serving, node_clients: Path, tmp_path: Path) -> None:
    ended = threading.Event()
    asking = [threading.Thread(target=_answer_until, args=(ended, server.url)) for _ in range(4)]
    for thread in asking:
        thread.start()
    try:
        arguments = (server.url, str(tmp_path), str(_CHROMIUM))
        printed = run_node_script(node_clients, HERE / "dashboard.mjs", *arguments, url=server.url)
    finally:
        ended.set()
        for thread in asking:
            thread.join()
    found = json.loads(printed.splitlines()[-1])
    told = found["told"]
    assert (told["state"], told["tiles"]) == ("Ready", 6)
    assert told["workers"] == ["decode-0"]
    assert told["nodes"] >= 1
    assert told["percents"] == ["100 %", "99.96 %", "50 %", "0.02 %", "0 %"]
    assert [name for name in told["sections"] if name != "Usage by key"] == [
        "Requests by class",
        "Where the workers' time goes",
        "Workers",
        "Context lengths",
        "Objectives",
        "Batches",
    ]
    assert told["background"] != found["darkBackground"]
    assert found["overflow"] == 0
    assert found["shown"] == {"title": "AlignedServe, live", "first": found["markup"], "elements": 0}
    assert found["afterLoss"] == "No connection; trying again."
    assert (found["problems"], found["elsewhere"]) == ([], [])
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("light", "dark", "narrow"))
