"""Metrics of the gateway, by the names that dashboards for vLLM read, and of the cluster, from the router's reports.

Never a request id in a label.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from alignedserve.gateway.metrics.iteration_metrics import iteration_log_metrics
from alignedserve.messages.gateways import ClusterStatus

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)

# name, help, value
_GAUGES: tuple[tuple[str, str, Callable[[ClusterStatus], float]], ...] = (
    ("alignedserve_pool_blocks", "Blocks of all KV pools.", lambda s: s.num_pool_blocks),
    ("alignedserve_pool_blocks_used", "Blocks of all KV pools in use.", lambda s: s.num_pool_blocks_used),
    (
        "alignedserve_pool_blocks_kept",
        "Of them, copies of what workers have, given up when room is short.",
        lambda s: s.num_pool_blocks_kept,
    ),
    ("alignedserve_worker_blocks", "Blocks of all workers.", lambda s: s.num_worker_blocks),
    ("alignedserve_worker_blocks_used", "Blocks of all workers in use.", lambda s: s.num_worker_blocks_used),
    ("alignedserve_requests_pooled", "Requests whose cache lies in a pool.", lambda s: s.num_pooled),
)
_MODEL_GAUGES: tuple[tuple[str, str, Callable[[ClusterStatus], float]], ...] = (
    ("vllm:num_requests_running", "Requests in prefill or decode.", lambda s: s.num_prefilling + s.num_decoding),
    ("vllm:num_requests_waiting", "Requests queued or pooled.", lambda s: s.num_queued + s.num_pooled),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the workers' blocks in use (1 is all).",
        lambda s: s.num_worker_blocks_used / s.num_worker_blocks if s.num_worker_blocks else 0.0,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[ClusterStatus], float]], ...] = (
    ("alignedserve_handoffs_verified", "KV handoffs whose proof held.", lambda s: s.num_handoffs_verified),
    ("alignedserve_evictions", "Requests moved from a running batch into a buffer.", lambda s: s.num_evictions),
    (
        "alignedserve_reused_tokens",
        "Of requests given out again: taken from a pool's copy.",
        lambda s: s.num_reused_tokens,
    ),
    ("alignedserve_recomputed_tokens", "Of the same: computed again.", lambda s: s.num_recomputed_tokens),
    (
        "alignedserve_output_lengths",
        "Finished requests whose output length was foreseen.",
        lambda s: s.lengths.num_finished,
    ),
    (
        "alignedserve_output_lengths_predicted",
        "Of them, by the length predictor and not by the mean of their class.",
        lambda s: s.lengths.num_predicted,
    ),
    ("alignedserve_output_length_tokens", "Tokens that they generated.", lambda s: s.lengths.num_tokens),
    (
        "alignedserve_output_length_error_tokens",
        "Sum of the differences between tokens expected on arrival and generated.",
        lambda s: s.lengths.error_tokens,
    ),
    ("alignedserve_handoffs_refused", "KV handoffs refused, then recomputed.", lambda s: s.num_handoffs_refused),
)


class GatewayMetrics:
    """Metrics of one gateway, in a registry of its own: several gateways can live in one process."""

    def __init__(self, model_name: str, status: Callable[[], ClusterStatus | None]) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._registry.register(_ClusterCollector(model_name, status))

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, help_text, ["model_name"], registry=self._registry, buckets=buckets)
            return metric.labels(model_name)

        def counter(name: str, help_text: str) -> Counter:
            return Counter(name, help_text, ["model_name"], registry=self._registry).labels(model_name)

        self.ttft_s = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self.gap_s = histogram("vllm:inter_token_latency_seconds", "Gap between tokens.", _GAP_BUCKETS)
        self.tpot_s = histogram("vllm:request_time_per_output_token_seconds", "Mean gap per request.", _GAP_BUCKETS)
        self.e2e_s = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _E2E_BUCKETS)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that began to answer.")
        self.generation_tokens = counter("vllm:generation_tokens", "Generated tokens.")
        self._finished = Counter(
            "vllm:request_success", "Requests ended.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._rejected = Counter(
            "alignedserve_rejected", "Requests refused or failed.", ["reason"], registry=self._registry
        )
        self._model_name = model_name

    def count_finished(self, reason: str) -> None:
        """Count a request that ended: stop, length, abort or error."""
        self._finished.labels(self._model_name, reason).inc()

    def count_rejected(self, reason: str) -> None:
        """Count a request that was refused or failed; `reason` comes from a closed set."""
        self._rejected.labels(reason).inc()

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)


class _ClusterCollector(Collector):
    """The router's counts as of the scrape; absent while no router is connected."""

    def __init__(self, model_name: str, status: Callable[[], ClusterStatus | None]) -> None:
        self._model_name = model_name
        self._status = status

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: names are not known to the registry ahead of a report."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        if status is None:
            return
        for name, help_text, value in _MODEL_GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=["model_name"])
            gauge.add_metric([self._model_name], value(status))
            yield gauge
        preemptions = CounterMetricFamily("vllm:num_preemptions", "Requests recomputed.", labels=["model_name"])
        preemptions.add_metric([self._model_name], status.num_preemptions)
        yield preemptions
        for name, help_text, value in _GAUGES:
            yield GaugeMetricFamily(name, help_text, value=value(status))
        for name, help_text, value in _COUNTERS:
            yield CounterMetricFamily(name, help_text, value=value(status))
        yield from iteration_log_metrics(status.iteration_log)
