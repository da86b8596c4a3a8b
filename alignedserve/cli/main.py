"""Command line of AlignedServe: declares the commands; the module of each is imported when it runs.

Imports inside functions are right here alone: `--help` and shell completion answer at once, without loading Ray,
PyTorch or an HTTP client.

The commands about a cluster that runs: on this host alone, or the one that `up` started.

As in main.py, the module of each is imported when it runs."""

import gc
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import entry_points
from importlib.metadata import version as installed_version
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from alignedserve.cli.batch.app import batch_app
from alignedserve.cli.console import (
    DEFAULT_URL,
    FAILURE,
    INTERRUPTED,
    exit_code,
    open_closed_streams,
    print_error,
    written_output,
)
from alignedserve.cli.keys.app import keys_app
from alignedserve.cli.models.app import models_app
from alignedserve.cli.options import (
    ChatCommandOptions,
    ClusterOption,
    JsonFlag,
    QuantizeOptions,
    ServeOptions,
    UrlOption,
    takes_options,
)
from alignedserve.config.environment import limit_thread_spinning, log_format, ray_address, set_log_format
from alignedserve.core.errors import AlignedServeError, ConfigError, NothingListens, ResourceError
from alignedserve.core.own_packages import require_own_kernels


def _is_here(cluster: str | None) -> bool:
    """Return whether a command is about a cluster that serves on this host alone, rather than one of `up`."""
    from alignedserve.cluster.deployments.admin_api import has_cluster

    return cluster is not None or (ray_address() is None and has_cluster())


def status(
    cluster: ClusterOption = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="Address of a gateway, on any host: its models, workers and load, without memory."),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Show the running cluster, on this host or of `up`: processes, load, memory (exit code 1 when it is not whole)."""
    if url is not None:
        if cluster is not None:
            raise ConfigError("--url goes without --cluster")
        from alignedserve.cli.commands.top import show_once

        raise typer.Exit(0 if show_once(url, json_output=json_output) else FAILURE)
    if _is_here(cluster):
        from alignedserve.cli.commands.cluster.one_host import status as run_here

        raise typer.Exit(0 if run_here(cluster, json_output=json_output) else FAILURE)
    from alignedserve.cli.commands.cluster.hosts import status as run

    raise typer.Exit(0 if run(json_output) else FAILURE)


def top(
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Address of a gateway. Its key is read from ALIGNEDSERVE_API_KEY.",
            show_default="the cluster on this host",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look for two seconds, print and end.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.2, max=3600.0, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Show what the cluster does, again and again: workers, queues, objectives, batches, where time goes."""
    from alignedserve.cli.commands.top import top as run

    run(url, is_once=once, every_s=every)


def logs(
    actor: Annotated[str | None, typer.Argument(help="Process, such as worker-0; without one: their names.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what it writes.")] = False,
    cluster: ClusterOption = None,
) -> None:
    """Print the end of the log of a process, on this host or of the cluster of `up`, on whichever node it runs."""
    if _is_here(cluster):
        from alignedserve.cli.commands.cluster.one_host import logs as run_here

        run_here(cluster, actor, follow=follow)
        return
    from alignedserve.cli.commands.cluster.hosts import logs as run

    run(actor, follow=follow)


def scale(
    counts: Annotated[list[str], typer.Argument(metavar="KIND=N...", help="Totals: decode=4 prefill=2.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Whose workers, where several models are served.")
    ] = None,
    cluster: ClusterOption = None,
) -> None:
    """Have more or fewer workers of the running cluster, while it serves."""
    from alignedserve.cli.models.serving import scale as run

    run(counts, model, cluster)


def drain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NODE", help="Its name, host name or address (see `status`); on one host the name of a worker."
        ),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Use it again.")] = False,
    within: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=86400.0, help="Seconds in which requests may finish where they are.", show_default="60"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also the last node with workers of a kind.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when it has drained.")] = True,
    cluster: ClusterOption = None,
) -> None:
    """Let the work of a node, or of a worker, finish or go elsewhere, then end its processes."""
    if undo and (force or not wait or within is not None):
        raise ConfigError("--undo goes with no other option")
    within_s = 60.0 if within is None else within
    if _is_here(cluster):
        from alignedserve.cli.commands.cluster import one_host

        if force:
            raise ConfigError("--force is for nodes; on one host the last worker of a kind stays")
        if undo:
            one_host.undo_drain(cluster, name)
        else:
            one_host.drain(cluster, name, within_s, waits=wait)
        return
    from alignedserve.cli.commands.cluster import hosts

    if undo:
        hosts.undo_drain(name)
    else:
        hosts.drain(name, within_s, is_forced=force, waits=wait)


def restart(
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Whose workers; else those of all models.")] = None,
    within: Annotated[
        float, typer.Option(min=0.0, max=86400.0, help="Seconds in which requests of each may finish where they are.")
    ] = 60.0,
    cluster: ClusterOption = None,
) -> None:
    """Start all workers of the running cluster anew, one after the other, without losing a request."""
    from alignedserve.cli.models.serving import restart as run

    run(model, within, cluster)


def stop(
    now: Annotated[bool, typer.Option("--now", help="Do not wait for answers that run (gateway.drain_s).")] = False,
) -> None:
    """Stop the cluster that `up` started, once what is open is answered. Ray itself goes on."""
    from alignedserve.cli.commands.cluster.hosts import stop as run
    from alignedserve.cluster.ray_node import NoRayHere

    try:
        run(at_once=now)
    except NoRayHere as error:
        if _is_here(None):
            problem = "this is for a cluster of `up`, and `alignedserve serve` runs here"
            raise ResourceError(f"{problem}: Ctrl-C there, or a SIGTERM, ends it") from error
        raise


def ray_storage(
    name: Annotated[str, typer.Option("--name", help="Of the cluster, among those that share the Redis.")] = "ray",
    worker: Annotated[bool, typer.Option("--worker", help="For a node that is not the head.")] = False,
) -> None:
    """Print the shell commands by which `ray start --head "$@"` uses the Redis of ALIGNEDSERVE_REDIS_URL."""
    from alignedserve.cli.commands.cluster.hosts import print_ray_storage as run

    run(name, is_worker=worker)


CLUSTER_COMMANDS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        "status": status,
        "top": top,
        "logs": logs,
        "scale": scale,
        "drain": drain,
        "restart": restart,
        "stop": stop,
        "ray-storage": ray_storage,
    }
)


LAB_COMMANDS = ("certify", "demo", "eval", "bench", "simulate", "plan", "replay", "profile", "gpu-check")
PANELS: Mapping[str, tuple[str, ...]] = MappingProxyType(  # of the help, by task
    {
        "Serve": ("serve", "up", "stop"),
        "Ask": ("chat", "batch", "explain"),
        "Look after a server": ("status", "top", "logs", "scale", "drain", "restart", "doctor", "ray-storage"),
        "Models": ("pull", "models", "quantize"),
        "Clients": ("keys", "usage"),
        "Measure and predict": LAB_COMMANDS,
    }
)


class CommandGroup(TyperGroup):
    """Looks for the laboratory's commands only when the core has none of that name, or when all are listed."""

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        names = {*super().list_commands(ctx), *self._lab}
        return [name for panel in PANELS.values() for name in panel if name in names]

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in LAB_COMMANDS:
            if cmd_name not in self._lab:
                ctx.fail(f"{cmd_name} is a command of the laboratory: pip install 'alignedserve[lab]'")
            command = self._lab[cmd_name]
        if command is not None:
            command.rich_help_panel = next(panel for panel, names in PANELS.items() if cmd_name in names)
        return command

    @cached_property
    def _lab(self) -> dict[str, Any]:
        apps = [point.load() for point in entry_points(group="alignedserve.commands")]
        return {name: command for app in apps for name, command in typer.main.get_group(app).commands.items()}


app = typer.Typer(
    name="alignedserve",
    cls=CommandGroup,
    help="AlignedServe serves real-time chat and best-effort documents from one fleet of LLM workers: "
    "chat keeps its objectives, documents are never lost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(batch_app, name="batch")
app.add_typer(keys_app, name="keys")
app.add_typer(models_app, name="models")


def main() -> None:
    """Run the command line; every error is one line on stderr and an exit code.

    2 usage, 75 Ray lost on this host, 130 Ctrl-C, 141 nobody reads what is printed, 1 any other failure."""
    open_closed_streams()
    limit_thread_spinning()
    try:
        require_own_kernels()
        with written_output():
            app(prog_name="alignedserve")
    except AlignedServeError as error:
        print_error(f"{error}{_elsewhere(error)}")
        sys.exit(exit_code(error))
    except KeyboardInterrupt:  # while commands are put together; one that runs ends itself
        sys.exit(INTERRUPTED)


def _elsewhere(error: AlignedServeError) -> str:
    """Return where this user's servers are, if nothing answers at the usual address."""
    if not isinstance(error, NothingListens) or error.url != DEFAULT_URL:
        return ""
    from alignedserve.cluster.deployments.admin_api import urls_here

    urls = [url for url in urls_here() if url != DEFAULT_URL]
    return f"; one runs here already: --url {' or '.join(urls)}" if urls else ""


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
    """Declare the options that stand before a command."""


def _use_log_format(name: str | None) -> None:
    """Set the format of the cluster's logs; None: from the environment. Raises ConfigError."""
    from alignedserve.process.logs import require_format

    set_log_format(require_format(name if name is not None else log_format()))


@app.command()
@takes_options
def serve(options: ServeOptions) -> None:
    """Start a cluster on this machine and serve until Ctrl-C; with --upstream or --engine, before other servers."""
    from alignedserve.config.model_settings import load_models

    _use_log_format(options.log_format)
    if options.upstream or options.engine:
        from alignedserve.cli.commands.serving.upstreams import serve as stand_before

        stand_before(options)
        return
    settings = load_models(options.config, options.all_overrides, options.named_models)
    settings.check()  # a mistake is told before what takes seconds is imported
    gc.disable()  # until it is up: modules leave no garbage
    from alignedserve.cli.forked_workers import forked_workers

    with forked_workers() as template:
        from alignedserve.cli.commands.serving.serve import serve as run

        run(options, settings, template)


@app.command()
@takes_options
def up(options: ServeOptions) -> None:
    """Serve on the nodes of the Ray cluster that runs here, and go on when this shell has ended."""
    from alignedserve.cli.commands.serving.serve import up as run

    _use_log_format(options.log_format)
    run(options)


for name, command in CLUSTER_COMMANDS.items():
    app.command(name)(command)


@app.command()
def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="ORG/NAME[:QUANTISATION][@REVISION]",
            help="Model on the hub (HF_ENDPOINT, HF_TOKEN), or a short name such as qwen3.",
        ),
    ],
) -> None:
    """Download a model from a Hugging Face hub and print its folder; goes on where an earlier pull ended."""
    from alignedserve.cli.models.cached import pull as run

    raise typer.Exit(run(model))


@app.command()
@takes_options
def quantize(options: QuantizeOptions) -> None:
    """Round the matrices of a model folder to 4 or 8 bits, into a new folder, and show what that changes."""
    from alignedserve.cli.commands.quantize import quantize as run

    raise typer.Exit(run(options))


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The response's `id`, or its x-request-id.")],
    url: UrlOption = DEFAULT_URL,
    json_output: JsonFlag = False,
) -> None:
    """Show where the time of a request went and what it waited for: while it runs, and for an hour after."""
    from alignedserve.cli.commands.explain import explain as run

    run(request_id, url, json_output=json_output)


@app.command("usage")
def show_usage(
    url: UrlOption = DEFAULT_URL,
    by: Annotated[str, typer.Option(help="Columns: key, model, class, hour or day.")] = "key,model",
    since: Annotated[str | None, typer.Option(help="A day or time, in UTC.", show_default="30 days ago")] = None,
    until: Annotated[str | None, typer.Option(help="A day or time, in UTC.", show_default="now")] = None,
    is_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Show the requests and tokens of your key, or of all keys where yours may see them."""
    from alignedserve.cli.batch.usage import UsageQuestion
    from alignedserve.cli.batch.usage import show_usage as run

    raise typer.Exit(run(url, UsageQuestion(by, since, until, is_csv, json_output)))


@app.command()
def doctor(json_output: JsonFlag = False) -> None:
    """Check this machine: Python, memory, devices, transports, and what is missing (exit code 1)."""
    from alignedserve.cli.commands.doctor import doctor as run

    raise typer.Exit(0 if run(json_output) else FAILURE)


@app.command()
@takes_options
def chat(options: ChatCommandOptions) -> None:
    """Talk to a running server in the terminal."""
    from alignedserve.cli.commands.chat import chat as run

    raise typer.Exit(run(options))
