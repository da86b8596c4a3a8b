"""Labels of metrics that outlive a change of names for one version."""

from types import SimpleNamespace
from typing import Any

from alignedserve.api.metrics.deployment_metrics import DeploymentCollector


def test_workers_keep_the_labels_that_dashboards_know() -> None:
    backend: Any = SimpleNamespace(num_answers=lambda: {"worker-0.2": 3, "prefill-1": 1}, status=lambda: None)
    collector = DeploymentCollector()
    collector.add("m", backend, "2")
    (metric,) = collector.collect()
    assert [(sample.labels["worker"], sample.value) for sample in metric.samples] == [
        ("prefill-1", 1),
        ("decode-0.2", 3),
    ]
