"""Metrics of the gateway, by the names that dashboards for vLLM read, and of its deployments, from routers' reports.

Never a request id in a label.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from alignedserve.api.backend.interface import CompletionBackend
from alignedserve.api.metrics.deployment_metrics import DeploymentCollector
from alignedserve.api.metrics.model_metrics import ModelMetricFamilies, ModelMetrics
from alignedserve.api.timelines.exporter import TraceExporter


class GatewayMetrics:
    """Metrics of one gateway, in a registry of its own: several gateways can live in one process."""

    def __init__(self, exporter: TraceExporter | None = None) -> None:
        """`exporter`: of traces; None: there are none."""
        self._registry = CollectorRegistry(auto_describe=True)
        self._families = ModelMetricFamilies(self._registry)
        self._deployments = DeploymentCollector()
        self._registry.register(self._deployments)
        if exporter is not None:
            self._registry.register(TraceCollector(exporter))
        self._rejected = Counter(
            "alignedserve_rejected", "Requests refused or failed.", ["reason"], registry=self._registry
        )

    def add_model(self, model_name: str, backend: CompletionBackend, deployment_id: str = "") -> ModelMetrics:
        """Show the reports of the deployment behind this backend; return the metrics of the model's requests."""
        self._deployments.add(model_name, backend, deployment_id)
        return ModelMetrics(model_name, self._families)

    def remove_deployment(self, deployment_id: str) -> None:
        """Show the reports of this deployment no more; what was measured of requests stays."""
        self._deployments.remove(deployment_id)

    def show_readiness(self, is_ready: Callable[[], bool]) -> None:
        """Show what /ready says; called once."""
        ready = Gauge("alignedserve_ready", "1 while this gateway is ready for requests.", registry=self._registry)
        ready.set_function(is_ready)

    def count_rejected(self, reason: str) -> None:
        """Count a request that was refused or failed; `reason` comes from a closed set."""
        self._rejected.labels(reason).inc()

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)


class TraceCollector(Collector):
    """Reads the exporter's counts."""

    def __init__(self, exporter: TraceExporter) -> None:
        self._exporter = exporter

    @override
    def collect(self) -> Iterator[Metric]:
        """Yield the counts."""
        spans = CounterMetricFamily(
            "alignedserve_trace_spans",
            "Spans of traces: sent, or dropped as the collector was not fast enough.",
            labels=["outcome"],
        )
        spans.add_metric(["exported"], self._exporter.num_exported)
        spans.add_metric(["dropped"], self._exporter.num_dropped)
        yield spans
