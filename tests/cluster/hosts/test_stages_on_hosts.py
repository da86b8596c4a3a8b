"""A worker whose stages are on two hosts of namespaces: the same answers as of one process, also after one was lost."""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from alignedserve import LLM, SamplingParams
from tests.harnesses.hosts.namespace_hosts import NamespaceHosts, obstacle
from tests.harnesses.hosts.rehearsal import SETTINGS, Rehearsal
from tests.support.waiting import wait_until

REASON = obstacle()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=f"no hosts can be made: {REASON}"),
]

PROMPT = "what is 4 + 5?"
NUM_TOKENS = 24


def answer(url: str, api_key: str) -> str:
    asked = {"model": "pocket", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    request.add_header("Authorization", f"Bearer {api_key}")
    with urllib.request.urlopen(request, timeout=120.0) as response:
        document: dict[str, Any] = json.load(response)
    return str(document["choices"][0]["text"])


def test_stages_on_two_hosts(hosts_folder: Path) -> None:
    llm = LLM("pocket", dtype="float32", memory_bytes=16 * 2**20)
    (expected,) = llm.generate([PROMPT], SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    llm.close()
    hosts = NamespaceHosts(2, hosts_folder, [Path(entry) for entry in sys.path if Path(entry).is_dir()])
    rehearsal = Rehearsal(hosts, (*SETTINGS, "engine.pipeline_parallel=2"))
    rehearsal.prepare()
    with hosts:
        rehearsal.up()
        urls = rehearsal.urls()
        assert [answer(url, rehearsal.api_key) for url in urls] == [expected.text] * 2
        (first, second) = (node["actors"] for node in rehearsal.status()["nodes"])
        assert "worker-0" in first
        assert "worker-0-stage-1" in second
        lines = hosts.hosts[1].run("ps", "-eww", "-o", "pid=,args=").stdout.splitlines()
        (stage,) = [line.split()[0] for line in lines if "ray::StageActor" in line]
        hosts.hosts[1].run("kill", "-KILL", stage)
        found: list[str | None] = []

        def is_back() -> bool:
            found.append(answer_or_none(urls[0], rehearsal.api_key))
            return bool(found[-1] == expected.text)

        wait_until(is_back, 120.0, lambda: found[-3:])
        rehearsal.ray("down")


def answer_or_none(url: str, api_key: str) -> str | None:
    try:
        return answer(url, api_key)
    except OSError:
        return None
