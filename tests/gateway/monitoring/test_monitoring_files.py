"""The Grafana dashboard and the alerts that ship: every metric and label that they read is at /metrics."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from alignedserve.batches.records import BatchTotals
from alignedserve.gateway import storage_metrics
from alignedserve.gateway.storage_metrics import Disks, batch_metrics
from tests.gateway.monitoring.live_samples import BUSY_STATUS
from tests.gateway.support import Gateway, gateway
from tests.support.marks import each

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/alignedserve.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
EXPRESSIONS = {
    **{f"panel {one['title']}, {target['refId']}": target["expr"] for one in PANELS for target in one["targets"]},
    **{f"alert {rule['alert']}": rule["expr"] for rule in RULES},
}
_METRIC = re.compile(r"(?:vllm:|alignedserve_)\w+(?:\{([^}]*)\})?")
_LABEL = re.compile(r'(\w+)\s*=~?\s*"')
_ONLY_WITH_TRACES = "alignedserve_trace_spans_total"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the thread that measures a file system for as long as it takes."""
    monkeypatch.setattr(storage_metrics, "_PATIENCE_S", 60.0)


async def served_labels(folder: Path) -> dict[str, set[str]]:
    """Return the names of all samples of a gateway at work with batches, and their labels."""
    async with gateway() as served:
        served.backend.set_status(BUSY_STATUS)
        await served.chat(headers={"x-slo-ttft-ms": "1000"})
        await served.chat(model="unknown")
        text = (await served.client.get("/metrics")).text
    totals = batch_metrics(BatchTotals(num_batches={"in_progress": 1})) + await Disks({"state": folder}).metrics()
    labels: dict[str, set[str]] = {_ONLY_WITH_TRACES: {"outcome"}}
    for family in text_string_to_metric_families(text + totals.decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


async def test_every_metric_and_label_that_is_read_is_served(tmp_path: Path) -> None:
    served = await served_labels(tmp_path)
    for where, expression in EXPRESSIONS.items():
        read = list(_METRIC.finditer(expression))
        assert read, where
        for metric in read:
            name = metric.group(0).partition("{")[0]
            assert name in served, f"{where}: {name}"
            assert set(_LABEL.findall(metric.group(1) or "")) <= served[name], f"{where}: {metric.group(0)}"


async def test_expressions_group_by_labels_that_are_served(tmp_path: Path) -> None:
    served = await served_labels(tmp_path)
    known = set().union(*served.values()) | {"instance"}  # Prometheus itself adds the last
    for where, expression in EXPRESSIONS.items():
        for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
            assert {label.strip() for label in grouped.split(",")} <= known, where


async def test_what_alerts_watch_for_growth_is_there_before_it_grows(served: Gateway) -> None:
    """A counter that appears with its first count has not grown, for Prometheus."""
    text = (await served.client.get("/metrics")).text
    families = text_string_to_metric_families(text + batch_metrics(BatchTotals()).decode())
    samples = [sample for family in families for sample in family.samples]
    for rule in RULES:
        for read in re.finditer(r"(?:rate|increase)\((\w+)\{([^}]*)\}", rule["expr"]):
            name, wanted = read.group(1), re.findall(r'(\w+)=~?"([^"]*)"', read.group(2))
            if name == _ONLY_WITH_TRACES:
                continue
            found = [
                one
                for one in samples
                if one.name == name and all(re.fullmatch(value, one.labels[label]) for label, value in wanted)
            ]
            assert found, f"{rule['alert']}: {read.group(0)}"


def test_what_every_gateway_says_of_all_batches_is_not_added_up() -> None:
    families = text_string_to_metric_families(batch_metrics(BatchTotals(num_batches={"in_progress": 1})).decode())
    names = {sample.name for family in families for sample in family.samples}
    read = {where: one for where, one in EXPRESSIONS.items() if names & set(re.findall(r"alignedserve_\w+", one))}
    assert len(read) > 5
    assert [where for where, one in read.items() if re.search(r"\bsum\b", one)] == []


def test_workers_of_one_name_are_told_apart_by_their_models() -> None:
    for where, expression in EXPRESSIONS.items():
        for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
            assert "worker" not in grouped or "model_name" in grouped, where


@each(
    "alert",
    ["ChatLateBesideDocuments", "RefusedOrFailed", "DocumentsLate", "LinesExpired", "BatchesLate", "BatchStateAway"],
)
def test_the_promise_to_chat_and_documents_is_watched(alert: str) -> None:
    assert f"AlignedServe{alert}" in {rule["alert"] for rule in RULES}
    (row,) = [one for one in DASHBOARD["panels"] if one["type"] == "row" and "The promise" in one["title"]]
    below = [one["title"] for one in PANELS if row["gridPos"]["y"] < one["gridPos"]["y"] < row["gridPos"]["y"] + 9]
    assert below == ["Chat's objectives missed", "Documents at work beside chat", "Documents late or lost"]


@each("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_panels_stand_within_the_page_and_none_upon_another(panel: dict[str, Any]) -> None:
    place = panel["gridPos"]
    assert 0 <= place["x"] <= place["x"] + place["w"] <= 24
    for other in PANELS:
        theirs = other["gridPos"]
        is_apart = (
            other is panel
            or theirs["x"] >= place["x"] + place["w"]
            or place["x"] >= theirs["x"] + theirs["w"]
            or theirs["y"] >= place["y"] + place["h"]
            or place["y"] >= theirs["y"] + theirs["h"]
        )
        assert is_apart, f"{panel['title']} and {other['title']}"
    assert len({one["id"] for one in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@each("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_every_alert_says_what_is_wrong_and_is_in_the_documentation(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]
    page = (Path(__file__).parents[3] / "docs/observability.md").read_text()
    assert f"`{rule['alert']}`" in page
