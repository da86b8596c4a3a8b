"""Two models on two hosts of namespaces: changed while requests run, with adapters, and with a host that is lost."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.harnesses.hosts.namespace_hosts import obstacle
from tests.harnesses.hosts.rehearsal import Rehearsal
from tests.support.waiting import wait_until

REASON = obstacle()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=f"no hosts can be made: {REASON}"),
]

_ORDER_S = 240.0
_KNOWN_S = 30.0


def post(rehearsal: Rehearsal, index: int, path: str, body: dict[str, object]) -> tuple[int, bytes]:
    """Ask the gateway of a host; return the status and the body."""
    url = rehearsal.urls()[index]
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    request.add_header("Authorization", f"Bearer {rehearsal.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=150.0) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def chat(rehearsal: Rehearsal, index: int, model: str) -> tuple[int, str]:
    """Return the status and the text of an answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "spell otter"}], "temperature": 0}
    status, content = post(rehearsal, index, "/v1/chat/completions", body)
    return status, json.loads(content)["choices"][0]["message"]["content"] if status == 200 else ""


def order(rehearsal: Rehearsal, index: int, words: str) -> str:
    return rehearsal.on_host(index, f"alignedserve {words}", timeout_s=_ORDER_S)


def workers(rehearsal: Rehearsal) -> dict[str, list[str]]:
    return {one["name"]: one["workers"] for one in rehearsal.status()["models"]}


class Load:
    """Chats through the gateways of some hosts, one after the other for each model, until the end of the block."""

    def __init__(self, rehearsal: Rehearsal, hosts: tuple[int, ...], *models: str) -> None:
        self.answers: Counter[tuple[int, str]] = Counter()
        self._is_over = threading.Event()
        self._rehearsal = rehearsal
        self._threads = [threading.Thread(target=self._ask, args=(host, one)) for host in hosts for one in models]

    def _ask(self, host: int, model: str) -> None:
        while not self._is_over.is_set():
            self.answers[chat(self._rehearsal, host, model)] += 1

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def test_both_models_answer_behind_both_gateways(rehearsal: Rehearsal) -> None:
    for index in range(2):
        for model in ("pocket", "b"):
            assert chat(rehearsal, index, model) == (200, "o t t e r")
    assert workers(rehearsal) == {"pocket": ["worker-0", "worker-1"], "b": ["worker-0.2", "worker-1.2"]}
    named = [one["name"] for one in json.loads(order(rehearsal, 1, "models status --json"))["deployments"]]
    assert named == ["pocket", "b"]


def test_models_are_replaced_added_and_removed_from_any_host_and_no_request_is_lost(rehearsal: Rehearsal) -> None:
    with Load(rehearsal, (0, 1), "pocket") as load:
        assert "the old pocket has ended" in order(rehearsal, 1, "models replace pocket pocket")
        assert "c is served" in order(rehearsal, 1, "models add pocket --name c")
        assert chat(rehearsal, 0, "c") == chat(rehearsal, 1, "c") == (200, "o t t e r")
        assert "b is removed" in order(rehearsal, 0, "models remove b")
    assert set(load.answers) == {(200, "o t t e r")}
    assert chat(rehearsal, 0, "b")[0] == chat(rehearsal, 1, "b")[0] == 404
    assert workers(rehearsal) == {"pocket": ["worker-0.3", "worker-1.3"], "c": ["worker-0.4", "worker-1.4"]}


def test_an_adapter_that_one_host_has_loaded_is_known_on_the_other(rehearsal: Rehearsal) -> None:
    adapter = {"lora_name": "terse", "lora_path": str(rehearsal.hosts.base / "adapters" / "terse")}
    status, content = post(rehearsal, 1, "/v1/load_lora_adapter", {**adapter, "base_model_name": "pocket"})
    assert status == 200, content
    ends_s = time.monotonic() + _KNOWN_S
    while chat(rehearsal, 0, "terse")[0] != 200:
        assert time.monotonic() < ends_s
        time.sleep(0.2)
    assert {chat(rehearsal, index, "terse")[0] for index in (0, 1, 0, 1)} == {200}
    assert post(rehearsal, 0, "/v1/unload_lora_adapter", {"lora_name": "terse"})[0] == 200
    while chat(rehearsal, 1, "terse")[0] != 404:
        assert time.monotonic() < ends_s
        time.sleep(0.2)


def test_workers_of_one_model_are_scaled(rehearsal: Rehearsal) -> None:
    assert "several models are served (pocket, c)" in order(rehearsal, 0, "scale decode=3")
    assert "worker-2.4 starts on node-" in order(rehearsal, 1, "scale decode=3 --model c")


def test_a_host_that_is_lost_is_missed_by_no_model_and_has_them_again(rehearsal: Rehearsal) -> None:
    lost = rehearsal.hosts.hosts[1]
    with Load(rehearsal, (0,), "pocket", "c") as load:
        time.sleep(1.0)
        rehearsal.hosts.kill(lost)
        wait_for(rehearsal, lambda found: len(found["nodes"]) == 1)
        time.sleep(1.0)
    assert set(load.answers) == {(200, "o t t e r")}
    rehearsal.hosts.boot(lost)  # Ray's head starts it again over SSH
    rehearsal.wait_until_used(lost)
    wait_for(rehearsal, lambda found: all(len(one["workers"]) >= 2 for one in found["models"]))
    for model in ("pocket", "c"):
        assert chat(rehearsal, 1, model) == (200, "o t t e r")


def wait_for(rehearsal: Rehearsal, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the status is as wanted."""
    wait_until(lambda: holds(rehearsal.status()), _ORDER_S, rehearsal.status, poll_s=2.0)
