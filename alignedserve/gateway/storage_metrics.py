"""Metrics of what a gateway stores: the space of its file systems, and batches."""

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from alignedserve.batches.records import BatchTotals
from alignedserve.process.background_tasks import PatientReader

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.5  # a file system that takes longer is told of at a later scrape


class Disks:
    """File systems by what is kept there. A hanging disk holds up one thread, and no scrape."""

    def __init__(self, places: Mapping[str, Path] | None = None) -> None:
        self._places = places or {}
        self._reader: PatientReader[bytes] = PatientReader(_PATIENCE_S)

    async def metrics(self) -> bytes:
        """Return the text that Prometheus scrapes; nothing where there are no places, or one does not answer."""
        if not self._places:
            return b""
        loop = asyncio.get_running_loop()
        return await self._reader.read(lambda: loop.run_in_executor(None, _measured, self._places)) or b""


def _measured(places: Mapping[str, Path]) -> bytes:
    registry = CollectorRegistry()
    size = Gauge(
        "alignedserve_disk_bytes", "Size of a file system, by what is kept there.", ["place"], registry=registry
    )
    free = Gauge("alignedserve_disk_free_bytes", "Bytes of it that are free for us.", ["place"], registry=registry)
    for name, path in places.items():
        try:
            space = os.statvfs(path)
        except OSError as error:
            logger.warning("the file system of %s cannot be measured: %s", path, error.strerror)
            continue
        size.labels(name).set(space.f_blocks * space.f_frsize)
        free.labels(name).set(space.f_bavail * space.f_frsize)
    return generate_latest(registry)


_GAUGES = (
    ("alignedserve_batch_lines_waiting", "Lines of batches that wait for a place.", "num_waiting"),
    ("alignedserve_batch_lines_running", "Lines of batches in the cluster.", "num_in_flight"),
    ("alignedserve_batches_at_risk", "Batches that are not expected to fit their window.", "num_at_risk"),
    ("alignedserve_batch_oldest_waiting_seconds", "Age of the oldest batch with a line waiting.", "oldest_waiting_s"),
    ("alignedserve_batches_paused", "1 while results cannot be written.", "is_paused"),
)


def batch_metrics(totals: BatchTotals | None) -> bytes:
    """Return the text that Prometheus scrapes; where the state of batches cannot be reached (None), that alone."""
    registry = CollectorRegistry()
    name = "alignedserve_batch_state_reachable"
    reachable = Gauge(name, "1 while files and batches can be read, 0 while none goes on.", registry=registry)
    reachable.set(totals is not None)
    if totals is not None:
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
        yield CounterMetricFamily(
            "alignedserve_batch_compute_seconds",
            "Seconds that workers computed for lines that ended.",
            value=totals.compute_us / 1e6,
        )
        for name, help_text, field in _GAUGES:
            yield GaugeMetricFamily(name, help_text, value=float(getattr(totals, field)))
        batches = GaugeMetricFamily("alignedserve_batches", "Batches that are not over.", labels=["status"])
        for status, count in sorted(totals.num_batches.items()):
            batches.add_metric([status], count)
        yield batches
