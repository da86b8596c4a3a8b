"""Generated tokens, and the gaps between them as a histogram, of each model: what is counted for every token.

So it is counted without a lock, by one thread.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString
from typing_extensions import override

EDGES_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
    *(20.0, 40.0, 80.0),
)
_BOUNDS = [str(floatToGoString(edge)) for edge in (*EDGES_S, INF)]  # type: ignore[no-untyped-call]


class TokenGaps:
    """The tokens and gaps of one model, which one thread counts."""

    __slots__ = ("_counts", "num_tokens", "sum_s")

    def __init__(self) -> None:
        self.num_tokens = 0
        self._counts = [0] * len(_BOUNDS)
        self.sum_s = 0.0

    def observe(self, gap_s: float) -> None:
        self._counts[bisect_left(EDGES_S, gap_s)] += 1
        self.sum_s += gap_s

    def counts(self) -> list[int]:
        return list(accumulate(self._counts))


class TokenGapsCollector(Collector):
    """Shows the gaps of all models at every scrape."""

    def __init__(self) -> None:
        self._models: dict[str, TokenGaps] = {}

    def labels(self, model_name: str) -> TokenGaps:
        return self._models.setdefault(model_name, TokenGaps())

    @override
    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        tokens = CounterMetricFamily("vllm:generation_tokens", "Generated tokens.", labels=["model_name"])
        for model_name, gaps in self._models.items():
            tokens.add_metric([model_name], gaps.num_tokens)
        yield tokens
        name = "vllm:inter_token_latency_seconds"
        family = HistogramMetricFamily(name, "Gap between tokens.", labels=["model_name"])
        for model_name, gaps in self._models.items():
            family.add_metric([model_name], list(zip(_BOUNDS, gaps.counts(), strict=True)), gaps.sum_s)
        yield family
