"""Metrics of the gateway, by the names that dashboards for vLLM read, and of its deployments, from routers' reports.

Never a request id in a label."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString
from typing_extensions import override

from alignedserve.api.backend.interface import CompletionBackend
from alignedserve.api.errors import REJECTION_CODES
from alignedserve.api.metrics.deployment_metrics import DeploymentCollector
from alignedserve.api.timelines.exporter import TraceExporter
from alignedserve.core.request import FinishReason, Request, RequestClass, Slo
from alignedserve.usage.ledger import UsageLedger

EDGES_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
    *(20.0, 40.0, 80.0),
)
_BOUNDS = [str(floatToGoString(edge)) for edge in (*EDGES_S, INF)]  # type: ignore[no-untyped-call]


class TokenGaps:
    """The tokens and gaps of one model, counted by one thread: no lock."""

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


# The last edges are for documents, which may wait for an hour.
_TTFT_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    *(640, 2560, 7680),
)
_E2E_BUCKETS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920),
    7680,
)
_TOKEN_BUCKETS = tuple(digit * 10**exponent for exponent in range(6) for digit in (1, 2, 5))
_CHOICE_BUCKETS = (1, 2, 5, 10, 20)
_TIERS = {RequestClass.REAL_TIME: "real_time", RequestClass.BEST_EFFORT: "best_effort"}
_OBJECTIVES = (("real_time", "ttft"), ("real_time", "tpot"), ("real_time", "deadline"), ("best_effort", "deadline"))


class ModelMetricFamilies:
    """The metrics of requests, labelled with the model's name; made once for all models of a gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, help_text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, help_text, ["model_name", *labels], registry=registry, buckets=buckets)

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(name, help_text, ["model_name", *labels], registry=registry)

        self.ttft_s = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self.tbt_s = TokenGapsCollector()
        registry.register(self.tbt_s)
        self.tpot_s = histogram("vllm:request_time_per_output_token_seconds", "Mean gap per request.", EDGES_S)
        self.e2e_s = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _E2E_BUCKETS)
        self.decode_s = histogram("vllm:request_decode_time_seconds", "First token to last token.", _E2E_BUCKETS)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that began to answer.")
        self.cached_tokens = counter("vllm:prompt_tokens_cached", "Of them, those from the prefix cache.")
        self.tokens_by_source = counter("vllm:prompt_tokens_by_source", "The same by where they came from.", "source")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens taken from the prefix cache.")
        self.finished = counter("vllm:request_success", "Requests ended.", "finished_reason")
        self.num_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKEN_BUCKETS)
        self.num_computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens per request not from the cache.", _TOKEN_BUCKETS
        )
        self.num_generated = histogram(
            "vllm:request_generation_tokens", "Generated tokens per request.", _TOKEN_BUCKETS
        )
        self.most_generated = histogram(
            "vllm:request_max_num_generation_tokens", "Generated tokens of a request's longest choice.", _TOKEN_BUCKETS
        )
        self.num_choices = histogram("vllm:request_params_n", "Choices per request.", _CHOICE_BUCKETS)
        self.max_tokens = histogram("vllm:request_params_max_tokens", "Tokens that requests may have.", _TOKEN_BUCKETS)
        self.ttft_of_tier_s = histogram(
            "alignedserve_time_to_first_token_seconds", "Arrival to first token, by class.", _TTFT_BUCKETS, "tier"
        )
        self.tpot_of_tier_s = histogram(
            "alignedserve_time_per_output_token_seconds", "Mean gap of a request, by class.", EDGES_S, "tier"
        )
        self.objectives = counter(
            "alignedserve_objectives",
            "Objectives that requests named or had by default, by whether they were held.",
            *("tier", "objective", "outcome"),
        )


class ModelMetrics:
    """The metrics of the requests to one model."""

    def __init__(self, model_name: str, families: ModelMetricFamilies) -> None:
        self.ttft_s = families.ttft_s.labels(model_name)
        self.tbt_s = families.tbt_s.labels(model_name)
        self.e2e_s = families.e2e_s.labels(model_name)
        self.decode_s = families.decode_s.labels(model_name)
        self.num_generated = families.num_generated.labels(model_name)
        self._tpot_s = families.tpot_s.labels(model_name)
        self._ttft_of_tier_s = {kind: families.ttft_of_tier_s.labels(model_name, _TIERS[kind]) for kind in _TIERS}
        self._tpot_of_tier_s = {kind: families.tpot_of_tier_s.labels(model_name, _TIERS[kind]) for kind in _TIERS}
        self._prompt_tokens = families.prompt_tokens.labels(model_name)
        self._cached_tokens = families.cached_tokens.labels(model_name)
        self._prefix_queries = families.prefix_queries.labels(model_name)
        self._prefix_hits = families.prefix_hits.labels(model_name)
        self._families = families
        self._model_name = model_name
        self._objectives: dict[tuple[str, str, str], int] = {}  # by tier, objective and outcome
        for tier, objective in _OBJECTIVES:  # at 0: Prometheus sees no growth in what is there for the first time
            for outcome in ("held", "missed"):
                families.objectives.labels(model_name, tier, objective, outcome)

    def count_finished(self, reason: str) -> None:
        """Count a request that ended: stop (after calls too, as vLLM counts), length, abort or error."""
        label = FinishReason.STOP.value if reason == FinishReason.TOOL_CALLS.value else reason
        self._families.finished.labels(self._model_name, label).inc()

    def observe_first_token(self, request: Request, ttft_s: float) -> None:
        """Measure the time to the first token of a choice."""
        self.ttft_s.observe(ttft_s)
        self._ttft_of_tier_s[request.request_class].observe(ttft_s)

    def observe_gaps(self, request: Request, tpot_s: float) -> None:
        """Measure the mean gap between the tokens of a choice that has ended."""
        self._tpot_s.observe(tpot_s)
        self._tpot_of_tier_s[request.request_class].observe(tpot_s)

    def count_prompt(self, request: Request, num_cached_tokens: int) -> None:
        """Count the prompt of a request that has its first token."""
        name, families = self._model_name, self._families
        self._prompt_tokens.inc(request.prompt_len)
        self._cached_tokens.inc(num_cached_tokens)
        num_computed = request.prompt_len - num_cached_tokens
        families.tokens_by_source.labels(name, "local_compute").inc(num_computed)
        families.tokens_by_source.labels(name, "local_cache_hit").inc(num_cached_tokens)
        families.num_prompt.labels(name).observe(request.prompt_len)
        families.num_computed.labels(name).observe(num_computed)
        if request.prefix_root:  # else it shares nothing
            self._prefix_queries.inc(request.prompt_len)
            self._prefix_hits.inc(num_cached_tokens)

    def count_request(self, choices: Sequence[Request], most_generated: int) -> None:
        """Count a complete request of the API, whose longest choice has that many tokens."""
        name, families = self._model_name, self._families
        families.num_choices.labels(name).observe(len(choices))
        families.max_tokens.labels(name).observe(choices[0].sampling.max_tokens)
        families.most_generated.labels(name).observe(most_generated)

    def count_objectives(self, request: Request, ttft_s: float, tpot_s: float, end_to_end_s: float) -> None:
        """Count the objectives of a choice that has ended: none where it had none."""
        measured_s = {"ttft": ttft_s, "tpot": tpot_s, "deadline": end_to_end_s}
        for objective, target_s in request.slo.targets:
            self._count_objective(request, objective, is_held=measured_s[objective] <= target_s)

    def count_refused(self, request: Request) -> None:
        """Count a choice that was not taken, or that failed: it held no objective."""
        self.count_finished("error")
        self.count_objectives(request, math.inf, math.inf, math.inf)

    def count_left(self, request: Request, ttft_s: float | None, gap_s: float, waited_s: float) -> None:
        """Count a choice whose client left, and of its objectives what is known: who leaves has often waited too long.

        `ttft_s`: None: its first token had not come. `gap_s`: the mean gap until the client left."""
        self.count_finished("abort")
        until_then_s = {"ttft": waited_s if ttft_s is None else ttft_s, "tpot": gap_s, "deadline": waited_s}
        for objective, target_s in request.slo.targets:
            if until_then_s[objective] > target_s:
                self._count_objective(request, objective, is_held=False)
            elif objective == "ttft" and ttft_s is not None:
                self._count_objective(request, objective, is_held=True)

    def _count_objective(self, request: Request, objective: str, *, is_held: bool) -> None:
        counted = (_TIERS[request.request_class], objective, "held" if is_held else "missed")
        self._objectives[counted] = self._objectives.get(counted, 0) + 1
        self._families.objectives.labels(self._model_name, *counted).inc()

    def objectives(self) -> list[tuple[str, str, str, int]]:
        """Return how often which objective was held or missed: tier, objective, outcome, count."""
        return [(*counted, count) for counted, count in self._objectives.items()]


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
        for reason in REJECTION_CODES:
            self._rejected.labels(reason)

    def add_model(
        self, model_name: str, backend: CompletionBackend, deployment_id: str = "", default_slo: Callable[[], Slo] = Slo
    ) -> ModelMetrics:
        """Show the reports of the deployment behind this backend; return the metrics of the model's requests.

        `default_slo`: returns the objectives of its requests that name none."""
        self._deployments.add(model_name, backend, deployment_id, default_slo)
        return ModelMetrics(model_name, self._families)

    def remove_deployment(self, deployment_id: str) -> None:
        """Show the reports of this deployment no more; what was measured of requests stays."""
        self._deployments.remove(deployment_id)

    def show_readiness(self, is_ready: Callable[[], bool]) -> None:
        """Show what /ready says; called once."""
        ready = Gauge("alignedserve_ready", "1 while this gateway is ready for requests.", registry=self._registry)
        ready.set_function(is_ready)

    def show_usage(self, ledger: UsageLedger) -> None:
        """Show what clients use; called once."""
        self._registry.register(UsageCollector(ledger))

    def count_rejected(self, reason: str) -> None:
        """Count a request that was refused or failed; `reason` comes from a closed set."""
        self._rejected.labels(reason).inc()

    def collected(self) -> "CollectedMetrics":
        """Return the metrics as they are now; for the event loop, whose objects they are read from."""
        return CollectedMetrics(list(self._registry.collect()))

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return self.collected().render()


class CollectedMetrics(Collector):
    """Metrics as they were, of which any thread may make the text: of eight models that takes tens of milliseconds."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._metrics

    def render(self, own_labels: Mapping[str, str] | None = None) -> bytes:
        """Return the text that Prometheus scrapes. `own_labels`: those that all samples have besides."""
        if own_labels is not None:
            for metric in self._metrics:
                metric.samples = [sample._replace(labels={**sample.labels, **own_labels}) for sample in metric.samples]
        return generate_latest(self)


class TraceCollector(Collector):
    """Reads the exporter's counts."""

    def __init__(self, exporter: TraceExporter) -> None:
        self._exporter = exporter

    @override
    def collect(self) -> Iterator[Metric]:
        spans = CounterMetricFamily(
            "alignedserve_trace_spans",
            "Spans of traces: sent, or dropped as the collector was not fast enough.",
            labels=["outcome"],
        )
        spans.add_metric(["exported"], self._exporter.num_exported)
        spans.add_metric(["dropped"], self._exporter.num_dropped)
        yield spans
