"""`alignedserve serve`: start a cluster on this machine, say what to do next, stop cleanly."""

import signal
import sys
import time
from types import FrameType

import msgspec
import typer
from rich.panel import Panel
from rich.table import Table

from alignedserve.cli.commands.options import ServeOptions
from alignedserve.cli.commands.start_screen import StartScreen
from alignedserve.cli.console import INTERRUPTED, notes, results
from alignedserve.cli.downloads import fetch_model
from alignedserve.cli.wiring import start_cluster
from alignedserve.cluster.hosts.cluster import ClusterOnHosts
from alignedserve.cluster.launch import AskedToStop, RunningCluster
from alignedserve.config.environment import api_keys
from alignedserve.config.loading import load_config
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import AlignedServeError
from alignedserve.runtime.model.built_in import POCKET

_READY_TIMEOUT_S = 120.0
_WATCH_S = 0.5  # between looks for an end whose interrupt was dropped


def serve(options: ServeOptions) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises an error of the tree, with nothing left running, when it cannot start."""
    started_s = time.monotonic()
    config = load_config(options.config, options.all_overrides)
    ending = _StopSignals()
    try:
        config = msgspec.structs.replace(config, model=fetch_model(config.model))
        cluster = _start(config, options.nodes, ending)
    except KeyboardInterrupt:
        notes().print("Interrupted before it was up; nothing is left running.")
        raise typer.Exit(INTERRUPTED) from None
    except AskedToStop:
        notes().print("Stopped before it was up; nothing is left running.")
        return
    end = cluster.stop
    try:
        with notes().status("Waiting for the first token …"):
            cluster.wait_ready(_READY_TIMEOUT_S)
        results().print(_welcome(cluster, time.monotonic() - started_s))
        while not ending.is_asked_for and cluster.check():
            time.sleep(_WATCH_S)
    except (KeyboardInterrupt, AskedToStop):
        notes().print("Stopping …")
    except AlignedServeError:
        raise
    except Exception:  # a fault of the driver's, for which requests need not end
        end = cluster.leave
        raise
    finally:
        end()


class _StopSignals:
    """Handler of Ctrl-C and SIGTERM alike, also where a shell started us in the background with SIGINT ignored.

    They raise where the main thread is, and are remembered as well: Python drops what is raised inside a destructor.
    """

    def __init__(self) -> None:
        self.is_asked_for = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.is_asked_for = True
        raise KeyboardInterrupt


def _start(config: ClusterConfig, num_nodes: int | None, ending: _StopSignals) -> RunningCluster:
    with StartScreen() as screen:
        cluster = start_cluster(config, screen, num_nodes)
    if ending.is_asked_for:
        cluster.stop()
        raise KeyboardInterrupt
    return cluster


def _welcome(cluster: RunningCluster, seconds: float) -> Panel:
    key = ' -H "Authorization: Bearer $ALIGNEDSERVE_API_KEY"' if api_keys() else ""
    question = "spell otter" if cluster.served.name == POCKET else "What is the capital of France?"
    body = f'{{"model":"{cluster.served.name}","messages":[{{"role":"user","content":"{question}"}}]}}'
    table = Table.grid(padding=(0, 2))
    # As this command was called: the environment need not be activated.
    table.add_row("Chat here", f"[bold]{sys.argv[0]} chat[/]  (in another terminal)")
    table.add_row("Web page", f"[bold]{cluster.url}/[/]")
    table.add_row("OpenAI API", f"[bold]{cluster.url}/v1[/]")
    table.add_row("Try", f"curl {cluster.url}/v1/chat/completions{key} -H 'content-type: application/json' -d '{body}'")
    if cluster.served.stored is not None:
        table.add_row("Weights", cluster.served.stored.description)
    if isinstance(cluster, ClusterOnHosts):
        for node in cluster.record().nodes:
            table.add_row(f"{node.hostname} {node.address}", node.summary)
    else:
        table.add_row("Running", _shape(cluster))
    if cluster.served.cache_dtype is not None:
        table.add_row("KV cache", f"{cluster.served.cache_dtype}, with a scale per token and head")
    table.add_row("Logs", str(cluster.folder / "logs"))
    table.add_row("Stop", "Ctrl-C")
    return Panel(table, title=f"AlignedServe serves [bold]{cluster.served.name}[/] (ready in {seconds:.1f} s)")


def _shape(cluster: RunningCluster) -> str:
    config = cluster.config
    if not config.chosen_topology.is_separate:
        workers = "worker" if config.decode.count == 1 else "workers"
        kind = f"{config.chosen_topology.value} {workers}"
        return f"{config.gateway.count} gateway, 1 router, {config.decode.count} {kind}"
    return (
        f"{config.gateway.count} gateway, 1 router, 1 KV pool, "
        f"{config.prefill.count} prefill and {config.decode.count} decode workers"
    )
