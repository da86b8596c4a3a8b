"""`alignedserve bench serve`: load on a running server, and what its clients saw."""

import asyncio
from dataclasses import replace
from pathlib import Path

from rich.progress import Progress

from alignedserve.cli.console import FAILURE, INTERRUPTED, progress, require_writable, results, to_json, write_json
from alignedserve.client.openai_client import CompletionApi, CompletionOutcome, OpenAiClient
from alignedserve.config.environment import client_api_key, data_dir
from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Slo
from lab.commands.bench.options import LoadOptions
from lab.loadgen.load_generator import LoadGenerator, LoadRun, SentRequest
from lab.loadgen.load_plan import LoadPlan, LoadRequest, TrafficClass, plan_synthetic, plan_trace
from lab.loadgen.prompts import CallMaker, load_tokenizer
from lab.loadgen.report import print_load_report
from lab.loadgen.summary import summarise
from lab.workload.catalogue import Library
from lab.workload.distributions import LengthLimits
from lab.workload.traces import mean_rate, read_trace, sped_up, window


def bench_serve(options: LoadOptions) -> int:
    """Run the command and return its exit code: 1 when no request completed, 130 when Ctrl-C ended it early."""
    plan = make_plan(options)
    if options.json_target is not None and options.json_target != "-":
        require_writable(Path(options.json_target), option="--json")
    run, model = asyncio.run(run_load(options, plan))
    report = summarise(run, plan.classes, num_clamped=(plan.num_clamped_prompts, plan.num_clamped_outputs))
    if options.json_target != "-":
        print_load_report(results(), report, title=f"{model} at {options.url}")
    if options.json_target is not None:
        write_json(
            to_json({"url": options.url, "model": model, "seed": options.seed, "report": report}), options.json_target
        )
    if run.was_interrupted:
        return INTERRUPTED
    return 0 if report.total.num_completed else FAILURE


def make_plan(options: LoadOptions) -> LoadPlan:
    """Plan what to send, from the trace or the specification. Raises ConfigError."""
    slo = Slo(options.slo_ttft_s, options.slo_tpot_s)
    if options.trace is None:
        assert options.synthetic is not None, "checked by the options themselves"
        plan = plan_synthetic(
            options.synthetic,
            seed=options.seed,
            num_requests=options.num_requests,
            duration_s=options.duration_s,
            limits=_limits(options),
            library=Library(data_dir()),
        )
        return replace(plan, classes=tuple(_with_default_slo(traffic, slo) for traffic in plan.classes))
    rows = window(read_trace(options.trace), options.start_s, options.duration_s)
    factor = options.rate_scale
    if options.rate is not None:
        if not mean_rate(rows):
            raise ConfigError("--rate: the chosen part of the trace has no rate of its own to stretch")
        factor = options.rate / mean_rate(rows)
    return plan_trace(sped_up(rows, factor), TrafficClass("trace", slo), _limits(options), options.num_requests)


def _limits(options: LoadOptions) -> LengthLimits:
    return LengthLimits(options.prompt_scale, options.output_scale, options.max_prompt, options.max_output)


def _with_default_slo(traffic: TrafficClass, slo: Slo) -> TrafficClass:
    ttft_s = slo.ttft_s if traffic.slo.ttft_s is None else traffic.slo.ttft_s
    tpot_s = slo.tpot_s if traffic.slo.tpot_s is None else traffic.slo.tpot_s
    return replace(traffic, slo=Slo(ttft_s, tpot_s, traffic.slo.deadline_s))


async def run_load(options: LoadOptions, plan: LoadPlan) -> tuple[LoadRun, str]:
    """Send a plan to the server of these options; return what happened and the model that answered."""
    client = OpenAiClient(url=options.url, api_key=client_api_key(), timeout_s=options.timeout_s)
    async with client:
        model = options.model or await client.model_name()
        maker = CallMaker(
            model=model,
            endpoint=CompletionApi(options.endpoint),
            seed=options.prompt_seed,
            limits_output=options.output_len == "exact",
            ignore_eos=options.ignore_eos,
        )
        with progress() as bar:
            _prepare_prompts(options, plan, maker, bar)
            run = await _send_all(options, plan, maker, client, bar)
    return run, model


def _prepare_prompts(options: LoadOptions, plan: LoadPlan, maker: CallMaker, bar: Progress) -> None:
    if options.tokenizer is None:
        return
    # A chat template adds what it likes; a text by itself has the special tokens of the tokenizer alone.
    is_bare = CompletionApi(options.endpoint) is CompletionApi.COMPLETIONS
    count_tokens = load_tokenizer(options.tokenizer, with_special=is_bare)
    if plan.closed_loops:
        maker.calibrate(count_tokens)
    for request in bar.track(plan.open_requests, description="prompts"):
        maker.prepare(request, count_tokens)


async def _send_all(
    options: LoadOptions, plan: LoadPlan, maker: CallMaker, client: OpenAiClient, bar: Progress
) -> LoadRun:
    classes = {traffic.name: traffic for traffic in plan.classes}
    total = None if plan.closed_loops and plan.max_closed is None else plan.max_closed or len(plan.open_requests)
    task = bar.add_task("requests", total=total, status="")
    num_failed = 0

    def on_done(sent: SentRequest) -> None:
        nonlocal num_failed
        num_failed += sent.outcome.failure is not None
        bar.update(task, advance=1, status=f"{num_failed} failed" if num_failed else "")

    async def send(request: LoadRequest, outcome: CompletionOutcome) -> None:
        await client.complete(maker.call(request, classes[request.class_name]), outcome)

    generator = LoadGenerator(
        plan=plan, send=send, on_done=on_done, cuts_off=options.cuts_off, warm_up_s=options.warm_up_s
    )
    try:
        return await generator.run()
    except asyncio.CancelledError:  # Ctrl-C: half an hour of measuring is not thrown away
        return generator.interrupted()
