"""Commands of `alignedserve bench`: declared here; the module of each is imported when it runs, as in main.py."""

import typer

from alignedserve.cli.options import takes_options
from lab.commands.bench.options import LoadOptions, VersusOptions

bench_app = typer.Typer(
    help="Measure a running server. Parts alone are measured in a checkout: `python -m benchmarks.engine`, `.kernels`, "
    "`.transfer`, `.scheduling.schedule`.",
    no_args_is_help=True,
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
    from lab.commands.bench.serve import bench_serve as run

    raise typer.Exit(run(options))


@bench_app.command("versus")
@takes_options
def bench_versus(options: VersusOptions) -> None:
    """Put the same loads on several servers, one after the other and in several rounds, and compare them.

    SERVER is NAME=COMMAND, which is started with {port} filled in and ended again, or NAME=URL of a running one:
    "ours=alignedserve serve MODEL --port {port}" "vllm=vllm serve MODEL --port {port}".
    """
    from lab.commands.bench.versus import bench_versus as run

    raise typer.Exit(run(options))
