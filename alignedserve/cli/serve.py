"""`alignedserve serve`: start a cluster on this machine, say what to do next, stop cleanly."""

import signal
import sys
import time
from pathlib import Path
from types import FrameType

import typer
from rich.panel import Panel
from rich.table import Table

from alignedserve.cli.console import INTERRUPTED, notes, results
from alignedserve.cli.wiring import start_cluster
from alignedserve.cluster.launch import RunningCluster
from alignedserve.config.environment import api_keys
from alignedserve.config.loading import load_config
from alignedserve.config.sections import Topology

_READY_TIMEOUT_S = 120.0


def serve(config_path: Path | None, overrides: list[str]) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises an error of the tree, with nothing left running, when it cannot start."""
    started_s = time.monotonic()
    config = load_config(config_path, overrides)
    _listen_for_the_end()
    try:
        with notes().status("Starting the cluster …"):
            cluster = start_cluster(config)
    except KeyboardInterrupt:
        notes().print("Interrupted before it was up; nothing is left running.")
        raise typer.Exit(INTERRUPTED) from None
    try:
        with notes().status("Waiting for the first token …"):
            cluster.wait_ready(_READY_TIMEOUT_S)
        results().print(_welcome(cluster, time.monotonic() - started_s))
        signal.pause()
    except KeyboardInterrupt:
        notes().print("Stopping …")
    finally:
        cluster.stop()


def _listen_for_the_end() -> None:
    """Ctrl-C and SIGTERM alike, also where a shell started us in the background with SIGINT ignored."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _welcome(cluster: RunningCluster, seconds: float) -> Panel:
    key = ' -H "Authorization: Bearer $ALIGNEDSERVE_API_KEY"' if api_keys() else ""
    body = f'{{"model":"{cluster.served.name}","messages":[{{"role":"user","content":"spell otter"}}]}}'
    table = Table.grid(padding=(0, 2))
    # As this command was called: nobody need have activated the environment.
    table.add_row("Chat here", f"[bold]{sys.argv[0]} chat[/]  (in another terminal)")
    table.add_row("Web page", f"[bold]{cluster.url}/[/]")
    table.add_row("OpenAI API", f"[bold]{cluster.url}/v1[/]")
    table.add_row("Try", f"curl {cluster.url}/v1/chat/completions{key} -H 'content-type: application/json' -d '{body}'")
    table.add_row("Running", _shape(cluster))
    table.add_row("Logs", str(cluster.folder / "logs"))
    table.add_row("Stop", "Ctrl-C")
    return Panel(table, title=f"AlignedServe serves [bold]{cluster.served.name}[/] (ready in {seconds:.1f} s)")


def _shape(cluster: RunningCluster) -> str:
    config = cluster.config
    if config.topology is Topology.COLOCATED:
        return f"{config.gateway.count} gateway, 1 router, {config.decode.count} colocated workers"
    return (
        f"{config.gateway.count} gateway, 1 router, 1 KV pool, "
        f"{config.prefill.count} prefill and {config.decode.count} decode workers"
    )
