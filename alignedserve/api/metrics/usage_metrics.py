"""Metrics of what clients use, with as many names of keys as a ledger shows by themselves; all others are one."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from alignedserve.usage.ledger import UsageLedger


class UsageCollector(Collector):
    """Reads a ledger's totals."""

    def __init__(self, ledger: UsageLedger) -> None:
        self._ledger = ledger

    @override
    def collect(self) -> Iterator[Metric]:
        labels = ["key", "model_name", "class"]
        tokens = CounterMetricFamily(
            "alignedserve_key_tokens",
            "Tokens of answers by key: prompt, cached (of the prompt), output.",
            labels=[*labels, "kind"],
        )
        requests = CounterMetricFamily("alignedserve_key_requests", "Requests with an answer by key.", labels=labels)
        seconds = CounterMetricFamily(
            "alignedserve_key_compute_seconds", "Seconds that workers computed for answers by key.", labels=labels
        )
        for subject, counts in list(self._ledger.totals.items()):
            requests.add_metric([*subject], counts.requests)
            tokens.add_metric([*subject, "prompt"], counts.input_tokens)
            tokens.add_metric([*subject, "cached"], counts.cached_tokens)
            tokens.add_metric([*subject, "output"], counts.output_tokens)
            seconds.add_metric([*subject], counts.compute_us / 1e6)
        yield tokens
        yield requests
        yield seconds
