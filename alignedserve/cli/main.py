"""Command line of AlignedServe: declares the commands; the module of each is imported when it runs.

Imports inside functions are right here alone: `--help` and shell completion answer at once, without loading Ray,
PyTorch or an HTTP client.
"""

import gc
import sys
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import entry_points
from importlib.metadata import version as installed_version
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from alignedserve.cli.batch.app import batch_app
from alignedserve.cli.cluster_commands import CLUSTER_COMMANDS
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
    JsonFlag,
    QuantizeOptions,
    ServeOptions,
    UrlOption,
    takes_options,
)
from alignedserve.config.environment import limit_thread_spinning, log_format, set_log_format
from alignedserve.core.errors import AlignedServeError, NothingListens
from alignedserve.core.own_packages import require_own_kernels

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

    2 usage, 75 Ray lost on this host, 130 Ctrl-C, 141 nobody reads what is printed, 1 any other failure.
    """
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
    """Start a cluster on this machine and serve until Ctrl-C; with --upstream, stand before other servers."""
    from alignedserve.config.model_settings import load_models

    _use_log_format(options.log_format)
    if options.upstream:
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
    from alignedserve.cli.commands.serving.up import up as run

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
