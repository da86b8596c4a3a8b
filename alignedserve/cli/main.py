"""The `alignedserve` command: declares every option, then hands over to the module of the command.

Importing a command's module happens inside its function, the one place of this repository where that is right: `--help`
and shell completion answer at once, without loading Ray, PyTorch or an HTTP client.
"""

import json
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.console import DEFAULT_URL, FAILURE, exit_code, print_error
from alignedserve.core.errors import AlignedServeError, ConfigError

app = typer.Typer(
    name="alignedserve",
    help="Real-time chat and best-effort documents from one fleet of prefill workers, decode workers and a KV pool.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench_app = typer.Typer(
    help="Measure a running server, or the engine, scheduling or block transfers alone.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")

UrlOption = Annotated[
    str, typer.Option("--url", help="Address of the server. Its key is read from ALIGNEDSERVE_API_KEY.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Model name.", show_default="the first the server lists")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file with the configuration.")]
BatchingOption = Annotated[
    str | None,
    typer.Option("--batching", metavar="fcfs|density_first", help="Short for --set batching.policy=NAME."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override one field of the configuration (repeatable)."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
SeedOption = Annotated[int, typer.Option("--seed", help="The same seed gives the same requests.")]


def main() -> None:
    """Run the command line; every error is one line on stderr and an exit code (2 usage, 1 failure, 130 Ctrl-C)."""
    try:
        app(prog_name="alignedserve")
    except AlignedServeError as error:
        print_error(error)
        sys.exit(exit_code(error))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"alignedserve {installed_version('alignedserve')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Declares the options that stand before a command."""


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Argument(help='Model folder, or "pocket" for the model that ships with AlignedServe.')
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    port: Annotated[int | None, typer.Option("--port", help="Short for --set gateway.port=PORT.")] = None,
    batching: BatchingOption = None,
) -> None:
    """Start a cluster on this machine and serve until Ctrl-C."""
    from alignedserve.cli.serve import serve as run

    run(config, serve_overrides(model, port, batching, overrides or []))


def serve_overrides(model: str | None, port: int | None, batching: str | None, overrides: list[str]) -> list[str]:
    """The conveniences of `serve` as the overrides they stand for; later ones win."""
    chosen = [] if model is None else [f"model.path={json.dumps(model)}"]  # quoted: a path is never a YAML number
    chosen += [] if port is None else [f"gateway.port={port}"]
    chosen += [] if batching is None else [f"batching.policy={batching}"]
    return chosen + overrides


@app.command()
def doctor(json_output: JsonFlag = False) -> None:
    """Check this machine: Python, memory, devices, transports, and what is missing (exit code 1)."""
    from alignedserve.cli.doctor import doctor as run

    raise typer.Exit(0 if run(json_output) else FAILURE)


@app.command()
def chat(
    url: UrlOption = DEFAULT_URL,
    model: ModelOption = None,
    once: Annotated[
        str | None,
        typer.Option("--once", metavar="PROMPT", help="Answer one prompt and leave (so does a prompt on stdin)."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 always takes the likeliest token.")] = 0.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer.", show_default="the server's limit")
    ] = None,
) -> None:
    """Talk to a running server in the terminal."""
    from alignedserve.cli.chat import ChatOptions
    from alignedserve.cli.chat import chat as run

    raise typer.Exit(run(ChatOptions(url, model, system, once, temperature, max_tokens)))


@app.command("eval")
def evaluate(
    suite: Annotated[str, typer.Argument(help="What to evaluate; there is one suite: pocket.")] = "pocket",
    url: UrlOption = DEFAULT_URL,
    num_per_skill: Annotated[int, typer.Option(min=1, help="Tasks per skill and per context length.")] = 50,
    seed: SeedOption = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests in the air at a time.")] = 8,
    threshold: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="A skill below this share makes exit code 1.")
    ] = 0.9,
    show_failures: Annotated[int, typer.Option(min=0, metavar="N", help="List up to N wrong answers.")] = 0,
    json_output: JsonFlag = False,
) -> None:
    """Measure the pocket model's exact-match accuracy per skill, through a running server."""
    from alignedserve.cli.evaluate import EvalOptions
    from alignedserve.cli.evaluate import evaluate as run

    options = EvalOptions(
        suite=suite,
        url=url,
        num_per_skill=num_per_skill,
        seed=seed,
        concurrency=concurrency,
        threshold=threshold,
        show_failures=show_failures,
        json_output=json_output,
    )
    raise typer.Exit(run(options))


@app.command()
def demo(
    duration_s: Annotated[float, typer.Option("--duration", min=1.0, help="Seconds of arrivals.")] = 120.0,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=0.001, help="Mean requests per second.", show_default="what two cores hold"),
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="Use this running server and do not start one.")] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    is_mixed: Annotated[
        bool, typer.Option("--mixed", help="Nine short prompts to a long one, instead of the trace's own.")
    ] = False,
    has_faults: Annotated[
        bool, typer.Option("--faults", help="Kill and stop workers and pool meanwhile, one after the other.")
    ] = False,
    batching: BatchingOption = None,
    seed: SeedOption = 0,
    json_output: JsonFlag = False,
) -> None:
    """Replay two minutes of a real trace, every request a task with a checkable answer, and count what went wrong.

    Exit code 1 when a request was lost, a block leaked or an answer was corrupted on its way.
    """
    from alignedserve.cli.demo import DemoOptions
    from alignedserve.cli.demo import demo as run

    options = DemoOptions(
        duration_s=duration_s,
        rate=rate,
        url=url,
        config_path=config,
        overrides=tuple(serve_overrides(None, None, batching, overrides or [])),
        is_mixed=is_mixed,
        has_faults=has_faults,
        seed=seed,
        json_output=json_output,
    )
    raise typer.Exit(run(options))


TraceOption = Annotated[
    Path | None, typer.Option("--trace", help="Azure CSV or Mooncake JSONL, also gzipped.", exists=True, dir_okay=False)
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
TtftOption = Annotated[float | None, typer.Option("--slo-ttft", min=0.0, help="Seconds to the first token.")]
TpotOption = Annotated[float | None, typer.Option("--slo-tpot", min=0.0, help="Mean seconds between tokens.")]
TokenizerOption = Annotated[
    Path | None, typer.Option(help="Folder with a tokenizer.json: prompts of exact length.", file_okay=False)
]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.001, help="Give a request up after this long.")]
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
    Lengths in tokens: a number, uniform(low,high), exponential(mean), choice(a,b,...), lognormal(median,p95).
    Objectives in seconds: ttft, tpot, deadline.
    """
    from alignedserve.bench.workload import LengthLimits
    from alignedserve.cli.bench import LoadOptions
    from alignedserve.cli.bench import bench_serve as run

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
        str | None, typer.Option("--shape", help="Named shape with random weights.", show_default="opt-125m")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model folder, in place of a shape.")] = None,
    workload: Annotated[
        str, typer.Option(help="Requests x prompt tokens : output tokens; a comma separates groups.")
    ] = "64x32:64",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seed: SeedOption = 0,
    json_output: JsonFlag = False,
) -> None:
    """Measure the engine alone, offline: no gateway, no router, no pool."""
    from alignedserve.cli.bench import EngineOptions
    from alignedserve.cli.bench import bench_engine as run

    if shape is not None and model is not None:
        raise ConfigError("give either --shape or --model")
    raise typer.Exit(run(EngineOptions(model or shape or "opt-125m", workload, dtype, seed, json_output)))


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
    from alignedserve.cli.bench import ScheduleOptions
    from alignedserve.cli.bench import bench_schedule as run

    options = ScheduleOptions(pool_sizes, lengths, max_blocks, max_requests, min_requests, seed, json_output)
    raise typer.Exit(run(options))


@bench_app.command("transfer")
def bench_transfer(
    shapes: Annotated[str, typer.Option(help="Models whose KV blocks are moved, by comma.")] = "pocket,opt-125m",
    sizes: Annotated[str, typer.Option(help="Sizes of one request's blocks in MiB, by comma.")] = "4,64",
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds; medians count.")] = 9,
    json_output: JsonFlag = False,
) -> None:
    """Measure how fast KV blocks move by every transport of this machine, against a plain copy of the same bytes."""
    from alignedserve.cli.bench import TransferOptions
    from alignedserve.cli.bench import bench_transfer as run

    mebibytes = tuple(int(size) if size.isascii() and size.isdigit() else 0 for size in sizes.split(","))
    raise typer.Exit(run(TransferOptions(tuple(shapes.split(",")), mebibytes, rounds, json_output)))
