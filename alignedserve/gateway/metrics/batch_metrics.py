"""Metrics of batches, counted by their driver and the same at every gateway."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from alignedserve.batches.records import BatchTotals

_GAUGES = (
    ("alignedserve_batch_lines_waiting", "Lines of batches that wait for a place.", "num_waiting"),
    ("alignedserve_batch_lines_running", "Lines of batches in the cluster.", "num_in_flight"),
    ("alignedserve_batches_at_risk", "Batches that are not expected to fit their window.", "num_at_risk"),
    ("alignedserve_batch_oldest_waiting_seconds", "Age of the oldest batch with a line waiting.", "oldest_waiting_s"),
    ("alignedserve_batches_paused", "1 while results cannot be written.", "is_paused"),
)


def batch_metrics(totals: BatchTotals) -> bytes:
    """Return the text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_BatchCollector(totals))
    return generate_latest(registry)


class _BatchCollector(Collector):
    def __init__(self, totals: BatchTotals) -> None:
        self._totals = totals

    @override
    def collect(self) -> Iterator[Metric]:
        totals = self._totals
        lines = CounterMetricFamily("alignedserve_batch_lines", "Lines of batches by how they ended.", labels=["state"])
        for state in ("completed", "failed", "expired", "cancelled"):
            lines.add_metric([state], getattr(totals, state))
        yield lines
        tokens = CounterMetricFamily("alignedserve_batch_tokens", "Tokens of lines that ended.", labels=["kind"])
        tokens.add_metric(["input"], totals.input_tokens)
        tokens.add_metric(["output"], totals.output_tokens)
        yield tokens
        for name, help_text, field in _GAUGES:
            yield GaugeMetricFamily(name, help_text, value=float(getattr(totals, field)))
        batches = GaugeMetricFamily("alignedserve_batches", "Batches that are not over.", labels=["status"])
        for status, count in sorted(totals.num_batches.items()):
            batches.add_metric([status], count)
        yield batches
