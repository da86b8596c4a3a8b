"""Options of `alignedserve models`; the import of the commands' modules is inside each function, as in main.py."""

from typing import Annotated

import typer

from alignedserve.cli.options import JsonFlag

models_app = typer.Typer(
    help="Models downloaded from a hub (list, rm); models of a running cluster (status, add, replace, remove).",
    no_args_is_help=True,
)

_ClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="ID", help="Its run folder's name, where several serve on this host.")
]
_PathArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Model, as `alignedserve serve` takes it.")]
_NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name by which clients call it.")]
_WithinOption = Annotated[
    float | None,
    typer.Option("--within", metavar="SECONDS", min=0.0, help="After which requests that are still open fail."),
]
_SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Setting of this model alone (repeatable)."),
]


@models_app.command("list")
def show_list(json_output: JsonFlag = False) -> None:
    """List the models in the cache of downloads (HF_HOME), also those of other programs."""
    from alignedserve.cli.models.cached import show_list as run

    run(json_output)


@models_app.command("rm")
def remove(
    model: Annotated[str, typer.Argument(metavar="ORG/NAME[@REVISION]", help="Model, or only one revision of it.")],
) -> None:
    """Remove a model, or one revision of it, whole or half downloaded. What other revisions share is kept."""
    from alignedserve.cli.models.cached import remove as run

    run(model)


@models_app.command("status")
def status(cluster: _ClusterOption = None, json_output: JsonFlag = False) -> None:
    """Show the models of the cluster that runs here, also models that are starting or ending."""
    from alignedserve.cli.models.serving import status as run

    run(cluster, json_output=json_output)


@models_app.command("add")
def add(
    model: _PathArgument,
    name: Annotated[
        str | None, typer.Option("--name", help="The name by which clients call it.", show_default="as of serve")
    ] = None,
    settings: _SettingsOption = None,
    cluster: _ClusterOption = None,
) -> None:
    """Serve one more model in the cluster that runs here; returns when it answers."""
    from alignedserve.cli.models.serving import add as run

    run(model, name, tuple(settings or ()), cluster)


@models_app.command("replace")
def replace(
    name: _NameArgument,
    model: _PathArgument,
    settings: _SettingsOption = None,
    within: _WithinOption = None,
    cluster: _ClusterOption = None,
) -> None:
    """Serve another model under a name that is served: no request is lost; returns when the old one has ended."""
    from alignedserve.cli.models.serving import replace as run

    run(name, model, tuple(settings or ()), within, cluster)


@models_app.command("remove")
def remove_served(name: _NameArgument, within: _WithinOption = None, cluster: _ClusterOption = None) -> None:
    """Serve a model no more; returns when its requests and its processes have ended."""
    from alignedserve.cli.models.serving import remove as run

    run(name, within, cluster)
