"""A real Prometheus scrapes a served model: every expression of the dashboard and the alerts has something to say."""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.serving import Serving, serving
from tests.gateway.monitoring.test_monitoring_files import DEPLOY, PANELS, RULES
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
]
_EMPTY_WITHOUT_FAILURE = ("alignedserve_trace_spans_total",)  # traces are off
_VARIABLES = {"$__rate_interval": "1m", "$__range": "5m", "$model": ".*"}


class Prometheus:
    """One Prometheus that scrapes one gateway every second, with the alerts that ship."""

    def __init__(self, folder: Path, gateway_port: int) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/api/v1"
        shutil.copy(DEPLOY / "prometheus/alerts.yml", folder)
        shipped = (DEPLOY / "prometheus/prometheus.yml").read_text()
        config = shipped.replace("127.0.0.1:8000", f"127.0.0.1:{gateway_port}")
        config = config.replace("scrape_interval: 5s", "scrape_interval: 1s").replace("15s", "1s")
        (folder / "prometheus.yml").write_text(config)
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
            )

    def get(self, path: str, **query: str) -> Any:
        """Return the data of an answer of its API; None while it does not answer."""
        url = f"{self._url}/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30.0) as response:
                return json.load(response)["data"]
        except OSError:
            return None

    def has_data(self, expression: str) -> bool:
        """Return whether an expression has a value now, whichever it is."""
        found = self.get("query", query=expression)
        return bool(found and found["result"])

    def end(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(60.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("run"), "pocket", "--set", "decode.count=1") as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture(scope="module")
def prometheus(served: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    made = Prometheus(tmp_path_factory.mktemp("prometheus"), served.port)
    try:
        yield made
    finally:
        made.end()


def expressions() -> dict[str, str]:
    """Return what panels and alerts read, by name; of an alert what it compares, as it is silent while all is well."""
    found = {f"{one['title']}, {target['refId']}": target["expr"] for one in PANELS for target in one["targets"]}
    for rule in RULES:
        text = rule["expr"].replace(" > 0)", ")")
        parts = re.split(r" (?:==|<|>) |\band\b|\bor\b", text)
        found |= {f"{rule['alert']}, {number}": part for number, part in enumerate(parts) if _is_read(part)}
    for name, expression in found.items():
        for variable, value in _VARIABLES.items():
            expression = expression.replace(variable, value)
        found[name] = expression
    return found


def _is_read(part: str) -> bool:
    return "alignedserve_" in part and "absent" not in part and not any(name in part for name in _EMPTY_WITHOUT_FAILURE)


def test_every_expression_has_data_and_every_alert_is_evaluated(served: Serving, prometheus: Prometheus) -> None:
    silent = expressions()
    assert len(silent) > len(PANELS)
    for _ in range(300):  # each a round of answers, so that every counter grows while it is scraped
        ask(served)
        silent = {name: expression for name, expression in silent.items() if not prometheus.has_data(expression)}
        # Pools have blocks with separate workers alone, and chat has missed nothing.
        silent_in_peace = ("Blocks in use, B", "AlignedServePoolFull", "AlignedServeChatLate", "AlignedServeWorkerRest")
        if not [name for name in silent if not name.startswith(silent_in_peace)]:
            break
    else:
        pytest.fail(f"nothing to say: {silent}")
    (group,) = prometheus.get("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in RULES]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    assert not [rule["lastError"] for rule in group["rules"] if rule.get("lastError")]


def ask(served: Serving) -> None:
    """Ask for an answer with objectives that are held, for one at best effort, and for what is refused."""
    body = {"model": "pocket", "prompt": [5, 6, 7] * 20, "max_tokens": 4}
    objectives = {"x-slo-ttft-ms": "3600000", "x-slo-tpot-ms": "3600000"}
    asked: tuple[tuple[dict[str, str], dict[str, str], int], ...] = (
        (objectives, {}, 200),
        ({}, {"service_tier": "flex"}, 200),
        ({}, {"model": "nobody"}, 404),
    )
    for headers, extra, status in asked:
        url = f"{served.url}/v1/completions"
        assert httpx.post(url, json={**body, **extra}, headers=headers, timeout=60.0).status_code == status
