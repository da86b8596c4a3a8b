"""Options of `alignedserve batch`; each command is performed by its own module.

Imports of a command's module are inside its function, as in main.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.console import DEFAULT_URL
from alignedserve.cli.options import JsonFlag, ModelOption, UrlOption, takes_options

BatchIdArgument = Annotated[str, typer.Argument(metavar="ID", help="The batch's id.", show_default=False)]


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """Options of `alignedserve batch submit`."""

    path: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="One JSON object per line.", exists=True, dir_okay=False, readable=True),
    ]
    url: UrlOption = DEFAULT_URL
    window: Annotated[str, typer.Option(help="How long it may take: 90s, 45m, 2h, 7d.")] = "24h"
    endpoint: Annotated[
        str | None, typer.Option(help="chat or completions.", show_default="where the first line goes")
    ] = None
    metadata: Annotated[
        tuple[str, ...], typer.Option("--metadata", metavar="NAME=VALUE", help="Kept with the batch (repeatable).")
    ] = ()
    idempotency_key: Annotated[
        str | None,
        typer.Option("--idempotency-key", metavar="KEY", help="The same key and file never make two batches."),
    ] = None
    not_before: Annotated[
        str | None,
        typer.Option("--not-before", metavar="TIME", help="No line starts before: 2026-11-25T22:00:00+01:00."),
    ] = None
    hours: Annotated[
        str | None, typer.Option(metavar="WINDOWS", help='Lines start only then: "Mon-Fri 22:00-06:00 Europe/Berlin".')
    ] = None
    priority: Annotated[
        int | None, typer.Option(help="Among your own batches; smaller goes first.", show_default="0")
    ] = None
    is_watched: Annotated[bool, typer.Option("--watch", help="Stay until it is over.")] = False
    is_checked: Annotated[
        bool, typer.Option("--check/--no-check", help="Look for mistakes in the file before sending it.")
    ] = True
    json_output: JsonFlag = False


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `alignedserve batch run`."""

    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Table: CSV, JSONL or Parquet.", exists=True, dir_okay=False, readable=True
        ),
    ]
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help='The question about each row, columns in braces: "Summarise: {text}".')
    ]
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="The same rows with answers: CSV, JSONL or Parquet.")
    ] = None
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message; columns as in --prompt.")] = None
    schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSON schema of answers; its properties become columns.", exists=True, dir_okay=False
        ),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="The first rows only, printed without --output.")] = None
    columns: Annotated[
        str | None, typer.Option(metavar="A,B", help="Columns of the table to keep.", show_default="all")
    ] = None
    model: ModelOption = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer.", show_default="what the context leaves")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=2.0, help="0: the likeliest.", show_default="as the model's makers say")
    ] = None
    window: Annotated[str, typer.Option(help="How long it may take: 90s, 45m, 2h, 7d.")] = "24h"
    url: UrlOption = DEFAULT_URL


batch_app = typer.Typer(
    help="Tables and files of best-effort requests: run, submit, watch, results. Works with any gateway.",
    no_args_is_help=True,
)


@batch_app.command("run")
@takes_options
def run_table(options: RunOptions) -> None:
    """Ask about every row of a table, and write the rows with their answers. Killed, the same command continues.

    Exit code 1 when a row has an error: its text is in the column `error`.
    """
    from alignedserve.cli.batch.run import run_table as run

    raise typer.Exit(run(options))


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
    from alignedserve.cli.batch.commands import show_results as run

    raise typer.Exit(run(url, batch_id, is_followed=is_followed, output=output))


@batch_app.command("errors")
def show_errors(batch_id: BatchIdArgument, url: UrlOption = DEFAULT_URL, json_output: JsonFlag = False) -> None:
    """Print what is wrong with the file, or with which of its lines; with --json one object per line."""
    from alignedserve.cli.batch.commands import show_errors as run

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
