"""Options that several commands share."""

from typing import Annotated

import typer

UrlOption = Annotated[
    str, typer.Option("--url", help="Address of the server. Its key is read from ALIGNEDSERVE_API_KEY.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Model name.", show_default="the first the server lists")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
SeedOption = Annotated[int, typer.Option("--seed", help="The same seed gives the same requests.")]
