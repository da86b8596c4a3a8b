"""A cluster of two hosts of namespaces: `ray up`, answers across hosts, the loss of one, its return, `ray down`."""

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alignedserve.evaluation.cluster_demo import SETTINGS, Rehearsal
from alignedserve.evaluation.namespace_hosts import NamespaceHosts, obstacle

REASON = obstacle()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=f"no hosts can be made: {REASON}"),
]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    """Two hosts with a worker each."""
    base = Path("/run") / f"alignedserve-{tmp_path_factory.getbasetemp().name}"
    hosts = NamespaceHosts(2, base, [Path(entry) for entry in sys.path if Path(entry).is_dir()])
    made = Rehearsal(hosts, SETTINGS)
    made.prepare()
    with hosts:
        made.up()
        yield made


def complete(url: str) -> str:
    body = {"model": "pocket", "messages": [{"role": "user", "content": "spell otter"}], "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60.0) as response:
        document: dict[str, Any] = json.load(response)
    return str(document["choices"][0]["message"]["content"])


def status(rehearsal: Rehearsal) -> dict[str, Any]:
    output = rehearsal.on_host(0, "alignedserve status --json")
    found: dict[str, Any] = json.loads(output[output.index("{") : output.rindex("}") + 1])
    return found


def wait_until(holds: Callable[[], bool], timeout_s: float, seen: object = "it never came to hold") -> None:
    ends_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends_s, seen
        time.sleep(1.0)


def answers(url: str) -> bool:
    try:
        return bool(complete(url))
    except (OSError, urllib.error.URLError):
        return False


def test_hosts_serve_together_and_one_is_lost_and_comes_back(rehearsal: Rehearsal) -> None:
    first, second = rehearsal.urls()
    assert complete(first) == complete(second) == "o t t e r"
    found = status(rehearsal)
    assert [node["hostname"] for node in found["nodes"]] == ["host0", "host1"]
    assert found["load"]["num_decode_workers"] == 2
    assert "gateway gateway-1 serves" in rehearsal.on_host(0, "alignedserve logs gateway-1")

    rehearsal.hosts.kill(rehearsal.hosts.hosts[1])
    wait_until(lambda: len(status(rehearsal)["nodes"]) == 1, 30.0)
    assert complete(first) == "o t t e r"

    rehearsal.hosts.boot(rehearsal.hosts.hosts[1])
    wait_until(lambda: answers(second), 240.0)
    assert status(rehearsal)["nodes"][1]["name"] == "node-1"

    rehearsal.ray("down")
    left: list[str] = []

    def nothing_is_left() -> bool:
        left[:] = [line for host in rehearsal.hosts.hosts for line in host.processes()]
        left.extend(line for host in rehearsal.hosts.hosts for line in host.run("ls", "/dev/shm").stdout.split())
        return not left

    wait_until(nothing_is_left, 120.0, left)
