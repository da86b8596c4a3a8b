"""The `alignedserve` command: declares every option, then hands over to the module of the command.

Importing a command's module happens inside its function, the one place of this repository where that is right: `--help`
and shell completion answer at once, without loading Ray, PyTorch or an HTTP client.
"""

import json
import os
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.batch.app import batch_app
from alignedserve.cli.bench.app import bench_app
from alignedserve.cli.console import DEFAULT_URL, FAILURE, exit_code, print_error
from alignedserve.cli.options import JsonFlag, ModelOption, SeedOption, UrlOption
from alignedserve.config.environment import limit_thread_spinning
from alignedserve.core.errors import AlignedServeError, ConfigError

app = typer.Typer(
    name="alignedserve",
    help="Real-time chat and best-effort documents from one fleet of prefill workers, decode workers and a KV pool.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(batch_app, name="batch")
app.add_typer(bench_app, name="bench")

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file with the configuration.")]
BatchingOption = Annotated[
    str | None,
    typer.Option("--batching", metavar="fcfs|density_first", help="Short for --set batching.policy=NAME."),
]
PolicyOption = Annotated[
    str | None,
    typer.Option("--policy", metavar="NAME", help="Scheduling policy: short for --set scheduling.policy=NAME."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override one field of the configuration (repeatable)."),
]


def main() -> None:
    """Run the command line; every error is one line on stderr and an exit code (2 usage, 1 failure, 130 Ctrl-C)."""
    limit_thread_spinning()
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
    policy: PolicyOption = None,
    batching: BatchingOption = None,
    quantization: Annotated[
        str | None, typer.Option("--quantization", metavar="int8", help="Short for --set model.quantization=int8.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="DIR", help="Short for --set recording.folder=DIR; see `alignedserve replay`."
        ),
    ] = None,
) -> None:
    """Start a cluster on this machine and serve until Ctrl-C."""
    from alignedserve.cli.commands.serve import serve as run

    chosen = [] if policy is None else [f"scheduling.policy={policy}"]
    chosen += [] if quantization is None else [f"model.quantization={json.dumps(quantization)}"]
    chosen += [] if record is None else [f"recording.folder={json.dumps(str(record))}"]
    run(config, serve_overrides(model, port, batching, chosen + (overrides or [])))


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(help="Folder that `serve --record` filled.", file_okay=False)],
    room: Annotated[
        str | None, typer.Option("--room", metavar="NAME", help="Only this room's decisions, and no simulation.")
    ] = None,
    fit_on: Annotated[
        Path | None,
        typer.Option("--fit-on", metavar="DIR", help="Another recorded run, from which the simulation gets its costs."),
    ] = None,
    costs: Annotated[
        str | None, typer.Option("--costs", metavar="fitted:FILE", help="Costs from `alignedserve profile`.")
    ] = None,
    outstanding: Annotated[
        list[str] | None,
        typer.Option(
            "--outstanding",
            metavar="rt|be=N",
            help="Simulate this class as N requests in the air at a time, not by the times at which they came.",
        ),
    ] = None,
    is_simulated: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Simulate the run and compare its times.")
    ] = True,
    json_output: JsonFlag = False,
) -> None:
    """Decide a recorded run again and compare every decision; simulate it and compare its times.

    Exit code 1 when a decision differs.
    """
    from alignedserve.cli.commands.replay import ReplayOptions
    from alignedserve.cli.commands.replay import replay as run

    if fit_on is not None and costs is not None:
        raise ConfigError("give either --fit-on or --costs")
    options = ReplayOptions(
        folder=folder,
        room=room,
        fit_on=fit_on,
        costs=costs,
        outstanding=tuple(outstanding or ()),
        is_simulated=is_simulated and room is None,
        json_output=json_output,
    )
    raise typer.Exit(run(options))


def serve_overrides(model: str | None, port: int | None, batching: str | None, overrides: list[str]) -> list[str]:
    """The conveniences of `serve` as the overrides they stand for; later ones win."""
    chosen = [] if model is None else [f"model.path={json.dumps(model)}"]  # quoted: a path is never a YAML number
    chosen += [] if port is None else [f"gateway.port={port}"]
    chosen += [] if batching is None else [f"batching.policy={batching}"]
    return chosen + overrides


@app.command()
def doctor(json_output: JsonFlag = False) -> None:
    """Check this machine: Python, memory, devices, transports, and what is missing (exit code 1)."""
    from alignedserve.cli.commands.doctor import doctor as run

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
    from alignedserve.cli.commands.chat import ChatOptions
    from alignedserve.cli.commands.chat import chat as run

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
    from alignedserve.cli.commands.evaluate import EvalOptions
    from alignedserve.cli.commands.evaluate import evaluate as run

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
    from alignedserve.cli.commands.demo import DemoOptions
    from alignedserve.cli.commands.demo import demo as run

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


@app.command()
def profile(
    model: Annotated[
        str, typer.Argument(help='Model folder, "pocket", or a named shape with random weights (opt-125m, ...).')
    ],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda (the first GPU) or cuda:N.")] = "cpu",
    num_threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads of a pass.", show_default="all cores")
    ] = None,
    duration_s: Annotated[float, typer.Option("--duration", min=1.0, help="Seconds of measuring.")] = 90.0,
    is_quick: Annotated[bool, typer.Option("--quick", help="Short for --duration 15.")] = False,
    is_cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Count processor time: for a busy machine; needs --threads 1.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the profile; its name is then fitted:FILE.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Measure what iterations cost on this machine and fit a cost model to them, for the simulator and the policies."""
    from alignedserve.cli.commands.profile import ProfileOptions
    from alignedserve.cli.commands.profile import profile as run

    options = ProfileOptions(
        model=model,
        dtype=dtype,
        device=device,
        num_threads=num_threads,
        duration_s=15.0 if is_quick else duration_s,
        is_cpu_time=is_cpu_time,
        json_output=json_output,
        output=output,
    )
    raise typer.Exit(run(options))


@app.command()
def simulate(
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME[:PARAMETER=VALUE,...]",
            help="A scheduling policy (repeatable).",
            show_default="aligned, aligned_slo, fcfs, sarathi",
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="LINE",
            help="Traffic in one line (docs/workloads.md), such as './last-night.csv, arrivals=recorded'.",
            show_default="a trace of conversations, TTFT 1 s, TPOT 0.1 s",
        ),
    ] = None,
    rates: Annotated[
        list[str] | None,
        typer.Option(
            "--rate",
            metavar="R[,R...]",
            help="Requests per second (repeatable).",
            show_default="2,3,4,6, or what the line says",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Whose sizes to take.", show_default="llama-2-13b")] = None,
    hardware: Annotated[str | None, typer.Option(help="Accelerator.", show_default="a100-80g")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="Accelerators of one worker.", show_default="1")
    ] = None,
    num_prefill: Annotated[int | None, typer.Option("--prefill", min=1, help="Prefill workers.")] = None,
    num_decode: Annotated[int | None, typer.Option("--decode", min=1, help="Decode workers.")] = None,
    num_colocated: Annotated[
        int | None,
        typer.Option(
            "--colocated",
            min=1,
            help="Colocated workers. Alone: every policy runs on such.",
            show_default="as many as --prefill and --decode together",
        ),
    ] = None,
    num_pools: Annotated[int, typer.Option("--pools", min=1, help="Nodes that the workers are shared out among.")] = 1,
    costs: Annotated[
        str,
        typer.Option(
            metavar="NAME|fitted:FILE",
            help="What iterations cost: roofline, a published measurement, or a profile of `alignedserve profile`.",
        ),
    ] = "roofline",
    duration_s: Annotated[
        float | None,
        typer.Option(
            "--duration",
            min=0.001,
            help="Seconds of arrivals.",
            show_default="60; with --workload a recording's own, otherwise 100 requests",
        ),
    ] = None,
    seed: SeedOption = 0,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Simulations at a time.", show_default="one per core")
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where report.html and simulation.json go.")] = Path(
        "simulation"
    ),
    json_output: JsonFlag = False,
) -> None:
    """Try policies and rates on a simulated cluster; write a report with plots, and JSON.

    Decisions are the live system's own code; what iterations and copies take comes from a cost model.
    docs/simulator.md says what is modelled and what is not.
    """
    from alignedserve.cli.commands.simulate import simulate as run
    from alignedserve.cli.commands.simulate_cases import SimulateOptions

    options = SimulateOptions(
        policies=tuple(policies or ()),
        workload=workload,
        rates=tuple(rates or ()),
        model=model,
        hardware=hardware,
        tensor_parallel=tensor_parallel,
        costs=costs,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_colocated=num_colocated,
        num_pools=num_pools,
        duration_s=duration_s,
        seed=seed,
        processes=processes or len(os.sched_getaffinity(0)),
        config_path=config,
        overrides=tuple(overrides or ()),
        output=output,
        json_output=json_output,
    )
    raise typer.Exit(run(options))
