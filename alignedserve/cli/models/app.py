"""Options of `alignedserve models`; the import of the commands' module is inside each function, as in main.py."""

from typing import Annotated

import typer

from alignedserve.cli.options import JsonFlag

models_app = typer.Typer(help="Models downloaded from a hub: list them, remove one.", no_args_is_help=True)


@models_app.command("list")
def show_list(json_output: JsonFlag = False) -> None:
    """List the models in the cache of downloads (HF_HOME), also those of other programs."""
    from alignedserve.cli.models.commands import show_list as run

    run(json_output)


@models_app.command("rm")
def remove(
    model: Annotated[str, typer.Argument(metavar="ORG/NAME[@REVISION]", help="Model, or only one revision of it.")],
) -> None:
    """Remove a model, or one revision of it, whole or half downloaded. What other revisions share is kept."""
    from alignedserve.cli.models.commands import remove as run

    run(model)
