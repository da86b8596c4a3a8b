"""Commands of the laboratory: `alignedserve` finds them by the entry point `alignedserve.commands`.

Imports inside functions are right here, as in the core's commands: `--help` answers at once.
"""

import typer

from alignedserve.cli.options import takes_options
from lab.commands.bench.app import bench_app
from lab.commands.certify.options import CertifyOptions
from lab.commands.gpu_check.options import GpuCheckOptions
from lab.commands.options import DemoOptions, EvalOptions, ProfileOptions
from lab.commands.simulation.options import PlanOptions, ReplayOptions, SimulateOptions

app = typer.Typer()
app.add_typer(bench_app, name="bench")


@app.command()
@takes_options
def simulate(options: SimulateOptions) -> None:
    """Try policies and rates on a simulated cluster; write a report with plots, and JSON.

    Decisions are the live system's own code; what iterations and copies take comes from a cost model.
    docs/simulator.md says what is modelled and what is not.
    """
    from lab.commands.simulation.simulate import simulate as run

    raise typer.Exit(run(options))


@app.command()
@takes_options
def plan(options: PlanOptions) -> None:
    """Find the workers, topology and policy that hold the objectives of a workload at the least cost.

    Searches with the simulator; writes a report, and the configuration file that starts the plan.
    Exit code 1 when no plan holds.
    """
    from lab.commands.simulation.plan import plan as run

    raise typer.Exit(run(options))


@app.command()
@takes_options
def replay(options: ReplayOptions) -> None:
    """Decide a recorded run again and compare every decision; simulate it and compare its times.

    Exit code 1 when a decision differs.
    """
    from lab.commands.simulation.replay import replay as run

    raise typer.Exit(run(options))


@app.command()
@takes_options
def certify(options: CertifyOptions) -> None:
    """Certify that chat keeps its objectives beside documents, on any OpenAI-compatible server; write a page, and JSON.

    Bursts of chat alone, the same beside three batches, the batches alone. Exit code 1 when a bound does not hold.
    """
    from alignedserve.cli.forked_workers import forked_workers

    with forked_workers(is_wanted=options.url is None and not options.is_simulated) as template:
        from lab.commands.certify.command import certify as run

        raise typer.Exit(run(options, template))


@app.command()
@takes_options
def demo(options: DemoOptions) -> None:
    """Replay two minutes of a real trace, every request a task with a checkable answer, and count what went wrong.

    Exit code 1 when a request was lost, a block leaked or an answer was corrupted on its way.
    """
    from alignedserve.cli.forked_workers import forked_workers

    with forked_workers(is_wanted=options.url is None) as template:
        from lab.commands.demo import demo as run

        raise typer.Exit(run(options, template))


@app.command("eval")
@takes_options
def evaluate(options: EvalOptions) -> None:
    """Count right answers per skill, through a running server: tasks of the pocket model, or general questions."""
    from lab.commands.evaluate import evaluate as run

    raise typer.Exit(run(options))


@app.command()
@takes_options
def profile(options: ProfileOptions) -> None:
    """Measure what iterations cost on this machine and fit a cost model to them, for the simulator and the policies."""
    from lab.commands.profile import profile as run

    raise typer.Exit(run(options))


@app.command("gpu-check")
@takes_options
def gpu_check(options: GpuCheckOptions) -> None:
    """Check in five minutes whether a GPU computes rightly, and how fast; writes one file to send back.

    Exit code 0: everything is right; 1: something is not; 3: there is no GPU here.
    """
    from lab.commands.gpu_check.command import gpu_check as run

    raise typer.Exit(run(options))
