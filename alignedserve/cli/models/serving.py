"""The models of a cluster that runs here, and their workers: `models status`, `add` … `remove`, `restart`, `scale`."""

from pathlib import Path

import msgspec
from rich.markup import escape
from rich.table import Table

from alignedserve.cli.console import notes, print_json, print_table, printable, results
from alignedserve.cluster.deployments.admin_api import show
from alignedserve.cluster.deployments.orders import (
    AddModel,
    DeploymentReport,
    ModelOrder,
    OrderDone,
    RemoveModel,
    ReplaceModel,
    RestartWorkers,
    ScaleWorkers,
    problem_of,
)
from alignedserve.cluster.hosts.orders import found_cluster
from alignedserve.cluster.hosts.resizing import parse_counts
from alignedserve.config.model_settings import named_model
from alignedserve.core.errors import ConfigError


def status(cluster: str | None, *, json_output: bool) -> None:
    with found_cluster(cluster) as ask:
        models = show(ask)
    if json_output:
        print_json(msgspec.to_builtins(models))
        return
    table = Table("model", "state", "open requests", "workers", "path", title=models.url, title_justify="left")
    for deployment in models.deployments:
        num_open = "-" if deployment.num_open is None else str(deployment.num_open)
        table.add_row(
            printable(deployment.name),
            _state(deployment),
            num_open,
            ", ".join(deployment.workers),
            printable(deployment.path),
        )
    print_table(table)


def _state(deployment: DeploymentReport) -> str:
    state = escape(printable(deployment.state))
    return state if deployment.leaves_in_s is None else f"{state}, leaves in {deployment.leaves_in_s:.0f} s"


def add(model: str, name: str | None, settings: tuple[str, ...], cluster: str | None) -> None:
    """Add a model. Raises ConfigError, ResourceError with the reason for a refusal, or PeerLost."""
    _give(adding(model, name, settings), cluster)


def adding(model: str, name: str | None, settings: tuple[str, ...]) -> AddModel:
    """Return the order to add a model that is given as to `serve`: MODEL or NAME=MODEL. Raises ConfigError."""
    named = named_model(model)
    if name is not None and "served_model_name" in named:
        raise ConfigError(f"{printable(model)} and --name both name the model: leave one out")
    return AddModel(_seen_from_anywhere(named["path"]), named.get("served_model_name", name), settings)


def replace(name: str, model: str, settings: tuple[str, ...], within_s: float | None, cluster: str | None) -> None:
    _give(ReplaceModel(name, _seen_from_anywhere(model), settings, within_s), cluster)


def remove(name: str, within_s: float | None, cluster: str | None) -> None:
    _give(RemoveModel(name, within_s), cluster)


def restart(model: str | None, within_s: float, cluster: str | None) -> None:
    """Restart workers one after the other. Raises as `add`."""
    _give(RestartWorkers(model, within_s), cluster)


def scale(counts: list[str], model: str | None, cluster: str | None) -> None:
    """Change the numbers of a model's workers. Raises ConfigError, or ResourceError saying what would fit. `model`: its
    name for clients; None: one is served."""
    _give(ScaleWorkers(parse_counts(counts), model), cluster)


def _give(order: ModelOrder | RestartWorkers | ScaleWorkers, cluster: str | None) -> None:
    problem = problem_of(order)
    if problem is not None:
        raise ConfigError(problem)

    def say(text: str) -> None:
        notes().print(f"{order.subject}: {text}", soft_wrap=True, markup=False)

    with found_cluster(cluster) as ask:
        try:
            answer = ask(order, say)
        except KeyboardInterrupt:
            notes().print("The order goes on without this command; see `alignedserve models status`.")
            raise
    if isinstance(answer, OrderDone):
        results().print(answer.text, soft_wrap=True, markup=False)


def _seen_from_anywhere(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model
