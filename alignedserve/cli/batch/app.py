"""Options of `alignedserve batch`; each command is performed by its own module.

Imports of a command's module are inside its function, as in main.py.
"""

from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.batch.options import BatchIdArgument, SubmitOptions
from alignedserve.cli.console import DEFAULT_URL
from alignedserve.cli.options import JsonFlag, UrlOption, takes_options

batch_app = typer.Typer(
    help="Files of best-effort requests: submit, watch, results. Works with any gateway.", no_args_is_help=True
)


@batch_app.command("submit")
@takes_options
def submit(options: SubmitOptions) -> None:
    """Check a file, send it and create a batch from it; prints the batch's id.

    Exit code 1 when the file has mistakes (nothing is sent then) or, with --watch, the batch does not complete.
    """
    from alignedserve.cli.batch.commands import submit as run

    raise typer.Exit(run(options))


@batch_app.command("status")
def status(batch_id: BatchIdArgument, url: UrlOption = DEFAULT_URL, json_output: JsonFlag = False) -> None:
    """Show a batch as it is now. Exit code 1 when it failed, expired or was cancelled."""
    from alignedserve.cli.batch.commands import status as run

    raise typer.Exit(run(url, batch_id, json_output))


@batch_app.command("watch")
def watch(batch_id: BatchIdArgument, url: UrlOption = DEFAULT_URL, json_output: JsonFlag = False) -> None:
    """Show a batch until it is over: progress, rate, expected end, time to spare. Exit code as for status."""
    from alignedserve.cli.batch.commands import watch as run

    raise typer.Exit(run(url, batch_id, json_output))


@batch_app.command("results")
def show_results(
    batch_id: BatchIdArgument,
    url: UrlOption = DEFAULT_URL,
    is_followed: Annotated[bool, typer.Option("--follow", help="Go on until the batch is over.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="Write here; resumes where an earlier run stopped.", dir_okay=False
        ),
    ] = None,
) -> None:
    """Print the answers so far, one JSON object per line, in the order in which they came."""
    from alignedserve.cli.batch.results import show_results as run

    raise typer.Exit(run(url, batch_id, is_followed=is_followed, output=output))


@batch_app.command("errors")
def show_errors(batch_id: BatchIdArgument, url: UrlOption = DEFAULT_URL, json_output: JsonFlag = False) -> None:
    """Print what is wrong with the file, or with which of its lines; with --json one object per line."""
    from alignedserve.cli.batch.results import show_errors as run

    raise typer.Exit(run(url, batch_id, json_output=json_output))


@batch_app.command("cancel")
def cancel(batch_id: BatchIdArgument, url: UrlOption = DEFAULT_URL, json_output: JsonFlag = False) -> None:
    """End a batch; what is done is kept."""
    from alignedserve.cli.batch.commands import cancel as run

    raise typer.Exit(run(url, batch_id, json_output))


@batch_app.command("pause")
def pause(batch_id: BatchIdArgument, url: UrlOption = DEFAULT_URL, json_output: JsonFlag = False) -> None:
    """Start no more lines of a batch; those that run go on, and so does its window."""
    from alignedserve.cli.batch.commands import pause as run

    raise typer.Exit(run(url, batch_id, json_output, is_paused=True))


@batch_app.command("resume")
def resume(batch_id: BatchIdArgument, url: UrlOption = DEFAULT_URL, json_output: JsonFlag = False) -> None:
    """Start lines of a paused batch again."""
    from alignedserve.cli.batch.commands import pause as run

    raise typer.Exit(run(url, batch_id, json_output, is_paused=False))


@batch_app.command("list")
def show_list(
    url: UrlOption = DEFAULT_URL,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 20,
    json_output: JsonFlag = False,
) -> None:
    """Show the newest batches."""
    from alignedserve.cli.batch.commands import show_list as run

    raise typer.Exit(run(url, limit, json_output))
