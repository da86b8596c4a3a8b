"""`alignedserve bench`: load on a running server, and the parts of a server that compute on no device."""

import asyncio
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.progress import Progress

from alignedserve.cli.console import FAILURE, notes, progress, results, write_json
from alignedserve.config.environment import client_api_key, data_dir
from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Slo
from alignedserve.loadgen.client import Endpoint, OpenAiClient, Outcome
from alignedserve.loadgen.load_generator import LoadGenerator, Run, Sent
from alignedserve.loadgen.load_plan import Plan, PlannedRequest, TrafficClass, plan_synthetic, plan_trace
from alignedserve.loadgen.prompts import CallMaker, load_tokenizer, to_json
from alignedserve.loadgen.report import print_load_report
from alignedserve.loadgen.summary import summarise
from alignedserve.microbench.tables import print_records
from alignedserve.workload.catalogue import Library
from alignedserve.workload.lengths import LengthLimits
from alignedserve.workload.traces import mean_rate, read_trace, sped_up, window


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the command line says."""

    url: str
    model: str | None = None
    endpoint: str = "chat"
    trace: Path | None = None
    synthetic: str | None = None
    num_requests: int | None = None
    start_s: float = 0.0
    duration_s: float | None = None
    rate: float | None = None
    rate_scale: float = 1.0
    limits: LengthLimits = field(default_factory=LengthLimits)
    output_len: str = "exact"
    ignore_eos: bool = False
    cuts_off: bool = False
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    tokenizer: Path | None = None
    timeout_s: float = 600.0
    seed: int = 0
    json_target: str | None = None

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.synthetic is None):
            raise ConfigError("give either --trace or --synthetic")
        if self.rate is not None and self.rate_scale != 1.0:
            raise ConfigError("give either --rate or --rate-scale")
        if self.synthetic is not None and (self.rate is not None or self.rate_scale != 1.0 or self.start_s):
            raise ConfigError("--rate, --rate-scale and --start belong to --trace; a synthetic class has its own rate=")
        if self.endpoint not in (endpoint.value for endpoint in Endpoint):
            raise ConfigError(f"--endpoint {self.endpoint}: must be chat or completions")
        if self.output_len not in ("exact", "free"):
            raise ConfigError(f"--output-len {self.output_len}: must be exact or free")
        if self.ignore_eos and self.output_len == "free":
            raise ConfigError("--ignore-eos needs --output-len exact: without a limit no answer would end")


def bench_serve(options: LoadOptions) -> int:
    """Run the command; returns its exit code (1 when no request completed)."""
    plan = make_plan(options)
    run, model = asyncio.run(_run(options, plan))
    report = summarise(run, plan.classes, num_clamped=(plan.num_clamped_prompts, plan.num_clamped_outputs))
    if options.json_target is not None:
        write_json(
            to_json({"url": options.url, "model": model, "seed": options.seed, "report": report}), options.json_target
        )
    if options.json_target != "-":
        print_load_report(results(), report, title=f"{model} at {options.url}")
    return 0 if report.total.num_completed else FAILURE


def make_plan(options: LoadOptions) -> Plan:
    """What to send, from the trace or the specification. Raises ConfigError."""
    slo = Slo(options.slo_ttft_s, options.slo_tpot_s)
    if options.trace is None:
        assert options.synthetic is not None, "checked by the options themselves"
        plan = plan_synthetic(
            options.synthetic,
            seed=options.seed,
            num_requests=options.num_requests,
            duration_s=options.duration_s,
            limits=options.limits,
            library=Library(data_dir()),
        )
        return replace(plan, classes=tuple(_with_default_slo(traffic, slo) for traffic in plan.classes))
    rows = window(read_trace(options.trace), options.start_s, options.duration_s)
    factor = options.rate_scale
    if options.rate is not None:
        if not mean_rate(rows):
            raise ConfigError("--rate: the chosen part of the trace has no rate of its own to stretch")
        factor = options.rate / mean_rate(rows)
    return plan_trace(sped_up(rows, factor), TrafficClass("trace", slo), options.limits, options.num_requests)


def _with_default_slo(traffic: TrafficClass, slo: Slo) -> TrafficClass:
    """The objectives of the command line, where the class has none of its own."""
    ttft_s = slo.ttft_s if traffic.slo.ttft_s is None else traffic.slo.ttft_s
    tpot_s = slo.tpot_s if traffic.slo.tpot_s is None else traffic.slo.tpot_s
    return replace(traffic, slo=Slo(ttft_s, tpot_s, traffic.slo.deadline_s))


async def _run(options: LoadOptions, plan: Plan) -> tuple[Run, str]:
    client = OpenAiClient(url=options.url, api_key=client_api_key(), timeout_s=options.timeout_s)
    async with client:
        model = options.model or await client.model_name()
        maker = CallMaker(
            model=model,
            endpoint=Endpoint(options.endpoint),
            seed=options.seed,
            limits_output=options.output_len == "exact",
            ignore_eos=options.ignore_eos,
        )
        with progress() as bar:
            _prepare_prompts(options, plan, maker, bar)
            run = await _send_all(plan, maker, client, bar, cuts_off=options.cuts_off)
    return run, model


def _prepare_prompts(options: LoadOptions, plan: Plan, maker: CallMaker, bar: Progress) -> None:
    if options.tokenizer is None:
        return
    count_tokens = load_tokenizer(options.tokenizer)
    if plan.closed_loops:
        notes().print(
            "prompts of closed-loop classes are not made ahead of time: they are as long as planned to a few percent",
            soft_wrap=True,
        )
        maker.calibrate(count_tokens)
    for request in bar.track(plan.open_requests, description="prompts"):
        maker.prepare(request, count_tokens)


async def _send_all(plan: Plan, maker: CallMaker, client: OpenAiClient, bar: Progress, *, cuts_off: bool) -> Run:
    classes = {traffic.name: traffic for traffic in plan.classes}
    total = None if plan.closed_loops and plan.max_closed is None else plan.max_closed or len(plan.open_requests)
    task = bar.add_task("requests", total=total, status="")
    num_failed = 0

    def on_done(sent: Sent) -> None:
        nonlocal num_failed
        num_failed += sent.outcome.failure is not None
        bar.update(task, advance=1, status=f"{num_failed} failed" if num_failed else "")

    async def send(request: PlannedRequest, outcome: Outcome) -> None:
        await client.complete(maker.call(request, classes[request.class_name]), outcome)

    return await LoadGenerator(plan=plan, send=send, on_done=on_done, cuts_off=cuts_off).run()


# --- bench schedule ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """What the command line says."""

    pool_sizes: str
    lengths: str
    max_blocks: int
    max_requests: int
    min_requests: int
    seed: int
    json_output: bool


def bench_schedule(options: ScheduleOptions) -> int:
    """Run the command; returns its exit code."""
    # Here and not above: it loads numpy, which bench serve does not need.
    from alignedserve.microbench.scheduling.benchmark import (
        ScheduleBenchmarkSpec,
        parse_pool_sizes,
        run_schedule_benchmark,
    )
    from kvpool.policies.batch_former import BatchLimits

    spec = ScheduleBenchmarkSpec(
        pool_sizes=parse_pool_sizes(options.pool_sizes),
        lengths=options.lengths,
        limits=BatchLimits(options.max_blocks, options.max_requests, options.min_requests),
        seed=options.seed,
    )
    with notes().status(f"{options.lengths}, {options.pool_sizes} pooled"):
        result = run_schedule_benchmark(spec)
    if options.json_output:
        write_json(to_json(result), "-")
        return 0
    print_records(results(), [asdict(row) for row in result.forming], title=f"batch formers, lengths {result.lengths}")
    print_records(results(), [asdict(row) for row in result.iterations], title="one decode iteration, lengths azure")
    return 0


# --- bench predictor --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PredictorOptions:
    """What the command line says."""

    texts: tuple[Path, ...]
    stored_sizes: tuple[int, ...]
    seed: int
    json_output: bool


# Of the accuracy figures; --json has all of them.
_SHOWN = (
    *("corpus", "predictor", "bucket_accuracy", "error_of_range", "error_of_mean", "relative_error"),
    *("rank_correlation", "share_retrieved"),
)


def bench_predictor(options: PredictorOptions) -> int:
    """Run the command; returns its exit code."""
    # Here and not above: it loads numpy, which bench serve does not need.
    from alignedserve.microbench.predictor.benchmark import PredictorBenchmarkSpec, run_predictor_benchmark

    spec = PredictorBenchmarkSpec(texts=options.texts, stored_sizes=options.stored_sizes, seed=options.seed)
    with progress() as bar:
        task = bar.add_task("predictor", total=spec.num_steps, status="")
        result = run_predictor_benchmark(spec, lambda part: bar.update(task, advance=1, status=part))
    if options.json_output:
        write_json(to_json(result), "-")
        return 0
    shown = [{name: value for name, value in asdict(row).items() if name in _SHOWN} for row in result.accuracy]
    print_records(results(), shown, title="output lengths foreseen")
    print_records(results(), [asdict(row) for row in result.speed], title="hashed_ngrams, microseconds")
    return 0
