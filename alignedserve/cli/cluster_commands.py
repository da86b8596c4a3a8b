"""The commands about a cluster that runs: on this host alone, or the one that `up` started.

As in main.py, the module of each is imported when it runs.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated

import typer

from alignedserve.cli.console import FAILURE
from alignedserve.cli.options import ClusterOption, JsonFlag
from alignedserve.config.environment import ray_address
from alignedserve.core.errors import ConfigError, ResourceError


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
