"""Metrics of traces: spans that reached the collector, and spans that did not."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from alignedserve.api.timelines.exporter import TraceExporter


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
