"""`alignedserve bench`: declares every option of its commands, then hands over to the module of the command.

Imports of a command's module are inside its function, as in main.py.
"""

from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.console import DEFAULT_URL
from alignedserve.cli.options import JsonFlag, ModelOption, SeedOption, UrlOption
from alignedserve.core.errors import ConfigError

bench_app = typer.Typer(
    help="Measure a running server, or kernels, engine, scheduling or block transfers alone.", no_args_is_help=True
)

TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace", help="Azure, BurstGPT or own CSV, Mooncake JSONL; also gzipped.", exists=True, dir_okay=False
    ),
]
SyntheticOption = Annotated[
    str | None, typer.Option("--synthetic", metavar="SPEC", help="Made-up traffic; the grammar stands above.")
]
CountOption = Annotated[int | None, typer.Option("--num-requests", min=1, help="Send at most this many.")]
StartOption = Annotated[float, typer.Option("--start", min=0.0, help="Trace: begin at this second.")]
DurationOption = Annotated[
    float | None,
    typer.Option("--duration", min=0.001, help="Trace: seconds of it to play. Synthetic: end of arrivals."),
]
RateOption = Annotated[float | None, typer.Option(min=0.001, help="Trace: stretch to this mean rate (1/s).")]
FactorOption = Annotated[float, typer.Option(min=0.001, help="Trace: arrivals this many times as fast.")]
PromptScaleOption = Annotated[float, typer.Option(min=0.001, help="Multiply prompt lengths.")]
OutputScaleOption = Annotated[float, typer.Option(min=0.001, help="Multiply output lengths.")]
MaxPromptOption = Annotated[int | None, typer.Option(min=1, help="Clamp prompts to this many tokens.")]
MaxOutputOption = Annotated[int | None, typer.Option(min=1, help="Clamp outputs to this many tokens.")]
OutputLenOption = Annotated[str, typer.Option(help="exact: send max_tokens; free: let the model decide.")]
EosOption = Annotated[
    bool, typer.Option("--ignore-eos/--honour-eos", help="Go on to max_tokens whatever the model says.")
]
CutOffOption = Annotated[
    bool,
    typer.Option("--cut-off/--wait", help="At the end give up closed-loop requests still in the air, uncounted."),
]
TtftOption = Annotated[float | None, typer.Option("--slo-ttft", min=0.0, help="Seconds to the first token.")]
TpotOption = Annotated[float | None, typer.Option("--slo-tpot", min=0.0, help="Mean seconds between tokens.")]
TokenizerOption = Annotated[
    Path | None, typer.Option(help="Folder with a tokenizer.json: prompts of exact length.", file_okay=False)
]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.001, help="Give a request up after this long.")]
DeviceOption = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")]
JsonTarget = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write the report as JSON.")]


@bench_app.command("serve")
def bench_serve(
    url: UrlOption = DEFAULT_URL,
    model: ModelOption = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    trace: TraceOption = None,
    synthetic: SyntheticOption = None,
    num_requests: CountOption = None,
    start_s: StartOption = 0.0,
    duration_s: DurationOption = None,
    rate: RateOption = None,
    rate_scale: FactorOption = 1.0,
    prompt_scale: PromptScaleOption = 1.0,
    output_scale: OutputScaleOption = 1.0,
    max_prompt: MaxPromptOption = None,
    max_output: MaxOutputOption = None,
    output_len: OutputLenOption = "exact",
    ignore_eos: EosOption = False,
    cuts_off: CutOffOption = False,
    slo_ttft_s: TtftOption = None,
    slo_tpot_s: TpotOption = None,
    tokenizer: TokenizerOption = None,
    timeout_s: TimeoutOption = 600.0,
    seed: SeedOption = 0,
    json_target: JsonTarget = None,
) -> None:
    """Put load on any OpenAI-compatible server, from a trace or made up, and report what its clients saw.

    SPEC is one or more classes: "rt: rate=2, cv=1, prompt=lognormal(100,300), output=60, ttft=1, tpot=0.1;
    be: outstanding=4, prompt=uniform(200,800), output=exponential(60), deadline=60, tier=flex".

    rate opens the loop (requests per second, cv 1 is Poisson), outstanding closes it (requests in the air).
    Lengths in tokens: a number, uniform(low,high), exponential(mean), choice(a,b,...), lognormal(median,p95),
    skewed(mean,deviation), mix(weight: law, ...); or a name such as sharegpt in place of prompt and output.
    docs/workloads.md lists all names and settings.
    Objectives in seconds: ttft, tpot, deadline.
    """
    from alignedserve.cli.bench.commands import LoadOptions
    from alignedserve.cli.bench.commands import bench_serve as run
    from alignedserve.workload.lengths import LengthLimits

    options = LoadOptions(
        url=url,
        model=model,
        endpoint=endpoint,
        trace=trace,
        synthetic=synthetic,
        num_requests=num_requests,
        start_s=start_s,
        duration_s=duration_s,
        rate=rate,
        rate_scale=rate_scale,
        limits=LengthLimits(prompt_scale, output_scale, max_prompt, max_output),
        output_len=output_len,
        ignore_eos=ignore_eos,
        cuts_off=cuts_off,
        slo_ttft_s=slo_ttft_s,
        slo_tpot_s=slo_tpot_s,
        tokenizer=tokenizer,
        timeout_s=timeout_s,
        seed=seed,
        json_target=json_target,
    )
    raise typer.Exit(run(options))


@bench_app.command("engine")
def bench_engine(
    shape: Annotated[
        str | None,
        typer.Option("--shape", help="Named shape with random weights.", show_default="opt-125m; GPU: llama-3-8b"),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model folder, in place of a shape.")] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="Requests x prompt tokens : output tokens, a comma between groups; or w1, w2, w3, w4, one; or "
            "iterations: single ones, against what the device can do.",
            show_default="w1; GPU: iterations",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16.", show_default="float32; GPU: bfloat16"),
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="int8: linear layers with weights of 8 bits.")] = None,
    device: DeviceOption = "auto",
    attention: Annotated[str, typer.Option(help="auto, triton, torch or an instruction set of the CPU.")] = "auto",
    seed: SeedOption = 0,
    json_output: JsonFlag = False,
) -> None:
    """Measure the engine alone, offline: no gateway, no router, no pool."""
    from alignedserve.cli.bench.device_commands import EngineOptions
    from alignedserve.cli.bench.device_commands import bench_engine as run

    if shape is not None and model is not None:
        raise ConfigError("give either --shape or --model")
    options = EngineOptions(model or shape, workload, dtype, quantization, device, attention, seed, json_output)
    raise typer.Exit(run(options))


@bench_app.command("kernels")
def bench_kernels(
    device: DeviceOption = "auto",
    shape: Annotated[str, typer.Option(help="Named shape whose heads and widths are used.")] = "llama-3-8b",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    is_toy: Annotated[bool, typer.Option("--toy", help="Sizes that show only whether everything runs.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Measure attention and the other kernels alone, by every implementation that runs here."""
    from alignedserve.cli.bench.device_commands import KernelOptions
    from alignedserve.cli.bench.device_commands import bench_kernels as run

    raise typer.Exit(run(KernelOptions(device, shape, dtype, is_toy, json_output)))


@bench_app.command("schedule")
def bench_schedule(
    pool_sizes: Annotated[
        str, typer.Option("--pool-sizes", help="Requests in the pool; a comma separates runs.")
    ] = "1000,10000,100000",
    lengths: Annotated[str, typer.Option(help="azure (the trace that ships), lognormal, uniform or one.")] = "azure",
    max_blocks: Annotated[int, typer.Option(min=1, help="Blocks of a batch.")] = 1000,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests of a batch.")] = 128,
    min_requests: Annotated[int, typer.Option(min=1, help="Requests that a batch should have.")] = 36,
    seed: SeedOption = 0,
    json_output: JsonFlag = False,
) -> None:
    """Measure the pool's index and its batch formers: no model, no cluster."""
    from alignedserve.cli.bench.commands import ScheduleOptions
    from alignedserve.cli.bench.commands import bench_schedule as run

    options = ScheduleOptions(pool_sizes, lengths, max_blocks, max_requests, min_requests, seed, json_output)
    raise typer.Exit(run(options))


@bench_app.command("predictor")
def bench_predictor(
    texts: Annotated[
        list[Path] | None,
        typer.Option(help="JSON lines with prompt and response, or instruction, input and output; may be repeated."),
    ] = None,
    stored: Annotated[
        list[int] | None, typer.Option(help="Finished requests in the store; may be repeated. 100, 10000 and 100000.")
    ] = None,
    seed: SeedOption = 0,
    json_output: JsonFlag = False,
) -> None:
    """Measure how well and how fast output lengths are foreseen: no model, no cluster."""
    from alignedserve.cli.bench.commands import PredictorOptions
    from alignedserve.cli.bench.commands import bench_predictor as run

    sizes = tuple(stored) if stored else (100, 10_000, 100_000)
    raise typer.Exit(run(PredictorOptions(tuple(texts or ()), sizes, seed, json_output)))


@bench_app.command("transfer")
def bench_transfer(
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Models whose KV blocks are moved, by comma.",
            show_default="pocket,opt-125m; of a GPU: opt-125m,llama-3-8b",
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="Sizes of one request's blocks in MiB, by comma.", show_default="4,64; of a GPU: 64,512"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds; medians count.")] = 9,
    device: DeviceOption = "auto",
    json_output: JsonFlag = False,
) -> None:
    """Measure how fast KV blocks move by every transport of this machine, against a plain copy of the same bytes.

    On a GPU also lists of blocks to page-locked memory and back, and between processes by CUDA IPC and NCCL.
    """
    from alignedserve.cli.bench.device_commands import TransferOptions
    from alignedserve.cli.bench.device_commands import bench_transfer as run

    named = None if shapes is None else tuple(shapes.split(","))
    mebibytes = None if sizes is None else tuple(map(_whole_number, sizes.split(",")))
    raise typer.Exit(run(TransferOptions(named, mebibytes, rounds, device, json_output)))


def _whole_number(text: str) -> int:
    """0 where it is none, which no size may be."""
    return int(text) if text.isascii() and text.isdigit() else 0
