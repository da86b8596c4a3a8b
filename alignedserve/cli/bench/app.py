"""Commands of `alignedserve bench`: declared here; the module of each is imported when it runs, as in main.py."""

import typer

from alignedserve.cli.bench.options import (
    EngineOptions,
    KernelOptions,
    LoadOptions,
    PredictorOptions,
    ScheduleOptions,
    TransferOptions,
)
from alignedserve.cli.options import takes_options

bench_app = typer.Typer(
    help="Measure a running server, or kernels, engine, scheduling or block transfers alone.", no_args_is_help=True
)


@bench_app.command("serve")
@takes_options
def bench_serve(options: LoadOptions) -> None:
    """Put load on any OpenAI-compatible server, from a trace or made up, and report what its clients saw.

    SPEC is one or more classes: "rt: rate=2, cv=1, prompt=lognormal(100,300), output=60, ttft=1, tpot=0.1;
    be: outstanding=4, prompt=uniform(200,800), output=exponential(60), deadline=60, tier=flex".

    rate opens the loop (requests per second, cv 1 is Poisson), outstanding closes it (requests in the air).
    Lengths in tokens: a number, uniform(low,high), exponential(mean), choice(a,b,...), lognormal(median,p95),
    skewed(mean,deviation), mix(weight: distribution, ...); or a name such as sharegpt in place of prompt and output.
    docs/workloads.md lists all names and settings.
    Objectives in seconds: ttft, tpot, deadline.
    """
    from alignedserve.cli.bench.serve import bench_serve as run

    raise typer.Exit(run(options))


@bench_app.command("engine")
@takes_options
def bench_engine(options: EngineOptions) -> None:
    """Measure the engine alone, offline: no gateway, no router, no pool."""
    from alignedserve.cli.bench.engine import bench_engine as run

    raise typer.Exit(run(options))


@bench_app.command("kernels")
@takes_options
def bench_kernels(options: KernelOptions) -> None:
    """Measure attention and the other kernels alone, by every implementation that runs here."""
    from alignedserve.cli.bench.kernels import bench_kernels as run

    raise typer.Exit(run(options))


@bench_app.command("schedule")
@takes_options
def bench_schedule(options: ScheduleOptions) -> None:
    """Measure the pool's index and its batch formers: no model, no cluster."""
    from alignedserve.cli.bench.schedule import bench_schedule as run

    raise typer.Exit(run(options))


@bench_app.command("predictor")
@takes_options
def bench_predictor(options: PredictorOptions) -> None:
    """Measure how well and how fast output lengths are foreseen: no model, no cluster."""
    from alignedserve.cli.bench.predictor import bench_predictor as run

    raise typer.Exit(run(options))


@bench_app.command("transfer")
@takes_options
def bench_transfer(options: TransferOptions) -> None:
    """Measure how fast KV blocks move by every transport of this machine, against a plain copy of the same bytes.

    On a GPU also lists of blocks to page-locked memory and back, and between processes by CUDA IPC and NCCL.
    """
    from alignedserve.cli.bench.transfer import bench_transfer as run

    raise typer.Exit(run(options))
