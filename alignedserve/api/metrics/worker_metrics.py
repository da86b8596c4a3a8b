"""Metrics of single workers and of the times of requests, as a router reported them last."""

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from alignedserve.messages.cluster_view import TIME_EDGES_S, TierLoad, TimeSpread, WorkerView
from alignedserve.messages.gateways import ClusterStatus

# name, help, value
_OF_WORKERS: tuple[tuple[str, str, Callable[[WorkerView], float]], ...] = (
    ("alignedserve_worker_requests_waiting", "Requests that a worker holds and does not run.", lambda w: w.num_waiting),
    ("alignedserve_worker_requests_running", "Requests in a worker's iterations.", lambda w: w.num_running),
    ("alignedserve_worker_blocks_used_ratio", "Share of a worker's blocks in use.", lambda w: _share(w)),
    ("alignedserve_worker_draining", "1 while a worker gets nothing new.", lambda w: w.is_draining),
)
_STAGES: tuple[tuple[str, Callable[[TierLoad], float]], ...] = (
    ("queued", lambda tier: tier.num_queued),
    ("prefilling", lambda tier: tier.num_prefilling),
    ("pooled", lambda tier: tier.num_pooled),
    ("decoding", lambda tier: tier.num_decoding),
)


def worker_metrics(status: ClusterStatus) -> Iterator[Metric]:
    """Yield the metrics of every worker, the number of workers by role, and the requests by class and stage."""
    for name, help_text, value in _OF_WORKERS:
        family = GaugeMetricFamily(name, help_text, labels=["worker"])
        for one in status.workers:
            family.add_metric([one.worker], float(value(one)))
        yield family
    tokens = CounterMetricFamily("alignedserve_worker_tokens", "Tokens generated, by worker.", labels=["worker"])
    for one in status.workers:
        tokens.add_metric([one.worker], one.num_tokens)
    yield tokens
    roles = GaugeMetricFamily("alignedserve_workers", "Workers that can do this, connected now.", labels=["role"])
    roles.add_metric(["prefill"], status.num_prefill_workers)
    roles.add_metric(["decode"], status.num_decode_workers)
    yield roles
    yield from _tiers(status)
    yield _cache_config(status)


def request_times(status: ClusterStatus) -> Iterator[Metric]:
    """Yield vLLM's histograms of where the time of requests goes."""
    times = status.times
    yield _histogram("vllm:request_queue_time_seconds", "Arrival until a worker has the prompt.", times.queue)
    yield _histogram("vllm:request_prefill_time_seconds", "From there to the first token.", times.prefill)
    yield _histogram("vllm:request_inference_time_seconds", "From there to the last token.", times.inference)


def _tiers(status: ClusterStatus) -> Iterator[Metric]:
    stages = GaugeMetricFamily("alignedserve_requests", "Requests by class and stage.", labels=["tier", "stage"])
    oldest = GaugeMetricFamily(
        "alignedserve_oldest_queued_seconds", "Wait of the oldest request in the queue.", labels=["tier"]
    )
    for name, tier in (("real_time", status.real_time), ("best_effort", status.best_effort)):
        for stage, value in _STAGES:
            stages.add_metric([name, stage], value(tier))
        oldest.add_metric([name], tier.oldest_queued_s)
    yield stages
    yield oldest


def _cache_config(status: ClusterStatus) -> Metric:
    """Return the sizes of caches as vLLM tells them, in labels: what balances load over servers reads them there."""
    family = GaugeMetricFamily(
        "vllm:cache_config_info", "Caches of all workers.", labels=["block_size", "num_gpu_blocks"]
    )
    family.add_metric([str(status.block_size), str(status.num_worker_blocks)], 1)
    return family


def _histogram(name: str, help_text: str, spread: TimeSpread) -> Metric:
    edges = (*map(floatToGoString, TIME_EDGES_S), "+Inf")
    family = HistogramMetricFamily(name, help_text, labels=[])
    family.add_metric([], list(zip(edges, accumulate(spread.counts), strict=True)), spread.sum_s)
    return family


def _share(worker: WorkerView) -> float:
    return worker.num_blocks_used / worker.num_blocks if worker.num_blocks else 0.0
