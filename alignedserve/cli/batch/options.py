"""Options of `alignedserve batch submit`, and what its other commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.console import DEFAULT_URL
from alignedserve.cli.options import JsonFlag, UrlOption

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
        str | None,
        typer.Option(metavar="WINDOWS", help='Lines start only then: "Mon-Fri 22:00-06:00 Europe/Berlin".'),
    ] = None
    priority: Annotated[
        int | None, typer.Option(help="Among your own batches; smaller goes first.", show_default="0")
    ] = None
    is_watched: Annotated[bool, typer.Option("--watch", help="Stay until it is over.")] = False
    is_checked: Annotated[
        bool, typer.Option("--check/--no-check", help="Look for mistakes in the file before sending it.")
    ] = True
    json_output: JsonFlag = False
