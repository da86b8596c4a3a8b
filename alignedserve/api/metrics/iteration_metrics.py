"""Metrics of the decode workers' iteration logs; docs/iteration_log.md explains them."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from alignedserve.messages.iteration_log import SPREAD_EDGES, IterationLogTotals


def iteration_log_metrics(totals: IterationLogTotals) -> Iterator[Metric]:
    """Yield every metric of the iteration logs, summed over all decode workers."""
    waiting_s = totals.nothing_to_do_s + totals.waiting_for_prefill_s + totals.prefetch_not_ready_s
    parts = {
        "waiting": waiting_s,
        "turnaround": totals.turnaround_s,
        "prepare": totals.prepare_s,
        "forward": totals.forward_s,
        "sampling": totals.sampling_s,
    }
    bubbles = {
        "misaligned": totals.misaligned_s,
        "prefetch_not_ready": totals.prefetch_not_ready_s,
        "waiting_for_prefill": totals.waiting_for_prefill_s,
        "nothing_to_do": totals.nothing_to_do_s,
    }
    yield _counter("decode_wall_seconds", "Wall time of the decode workers.", totals.wall_s)
    yield _labelled("decode_seconds", "Wall time of the decode workers by part.", "part", parts)
    yield _labelled("bubble_seconds", "Lost time by cause; misaligned is within part=forward.", "cause", bubbles)
    yield _counter("iterations", "Decode iterations.", totals.num_iterations)
    yield _counter("switch_iterations", "Decode iterations in which two batches mixed.", totals.num_switch_iterations)
    ahead = "Decode iterations launched before the tokens of the one before were known."
    yield _counter("ahead_iterations", ahead, totals.num_ahead_iterations)
    yield _counter("iteration_requests", "Running requests, counted in every iteration.", totals.num_requests)
    yield _spread(totals)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"alignedserve_{name}", help_text, value=value)


def _labelled(name: str, help_text: str, label: str, values: dict[str, float]) -> Metric:
    family = CounterMetricFamily(f"alignedserve_{name}", help_text, labels=[label])
    for label_value, value in values.items():
        family.add_metric([label_value], value)
    return family


def _spread(totals: IterationLogTotals) -> Metric:
    edges = (*map(floatToGoString, SPREAD_EDGES), "+Inf")
    buckets = list(zip(edges, accumulate(totals.spread_counts), strict=True))
    family = HistogramMetricFamily("alignedserve_batch_spread", "Longest context of a batch over its mean.", labels=[])
    family.add_metric([], buckets, totals.sum_of_spreads)
    return family
