"""`alignedserve up`: serve on the nodes of the Ray cluster that runs here, also after this shell has ended."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from rich.markup import escape
from rich.table import Table

from alignedserve.cli.commands.options import ServeOptions
from alignedserve.cli.console import notes, results
from alignedserve.cluster.hosts.client import connected
from alignedserve.cluster.hosts.record import ClusterRecord, read_record, recorded_driver
from alignedserve.cluster.hosts.supervisor import driver_log, end_supervisor, start_supervisor
from alignedserve.config.environment import API_KEYS_VARIABLE, api_keys, ray_address
from alignedserve.config.loading import load_config
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import ResourceError
from alignedserve.runtime.model.built_in import POCKET
from alignedserve.scheduling.topology import require_effect

_READY_S = 900.0
_POLL_S = 0.5
_TAIL_LINES = 15
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_BOOTSTRAP_NAME = "ray_bootstrap_config.yaml"  # in the head's home


def up(options: ServeOptions) -> None:
    """Start the supervisor of a driver, in place of any former one, and wait until the cluster answers.

    Raises an error of the tree, with the driver's last words, when it does not.
    """
    config = load_config(options.config, options.all_overrides)
    require_effect(config)  # a mistake is reported here, not in a log
    if config.gateway.host not in _LOOPBACK and not api_keys():
        notes().print(f"warning: anyone who reaches the gateways may use them; set {API_KEYS_VARIABLE}", soft_wrap=True)
    with connected():
        end_supervisor()
        former = recorded_driver()
        supervisor = start_supervisor(driver_command(options, config), ray_address() or "auto")
        with notes().status("Starting the cluster …"):
            record = _wait_ready(former, lambda: supervisor.poll() is not None)
    results().print(urls_of(record))


def urls_of(record: ClusterRecord) -> Table:
    """Return the addresses at which a cluster answers."""
    num_serving = sum(bool(node.actors) for node in record.nodes)
    table = Table(title=f"AlignedServe serves {record.model} on {_counted(num_serving)}", title_justify="left")
    for heading in ("node", "host", "answers at"):
        table.add_column(heading)
    for node in record.nodes:
        table.add_row(
            node.name or "-", f"{node.hostname} ({node.address})", escape(node.problem or "\n".join(node.urls))
        )
    return table


def _counted(num_nodes: int) -> str:
    return f"{num_nodes} node" if num_nodes == 1 else f"{num_nodes} nodes"


def driver_command(options: ServeOptions, config: ClusterConfig) -> list[str]:
    """Return the driver's command line: that of `serve`, with paths as seen from any folder.

    `config`: what the options amount to, seen from the folder of this shell.
    """
    command = [sys.executable, "-m", "alignedserve", "serve"]
    if options.config is not None:
        command += ["--config", str(options.config.absolute())]
    for override in (*options.all_overrides, *_absolute_paths(config)):
        command += ["--set", override]
    return [*command, "--nodes", str(options.nodes or expected_nodes(Path.home() / _BOOTSTRAP_NAME))]


def _absolute_paths(config: ClusterConfig) -> list[str]:
    """Return overrides for paths that mean something else in the driver's folder, which is not the shell's."""
    model = config.model.path
    paths = {
        "model.path": model if model != POCKET and Path(model).exists() else None,
        "batches.folder": config.batches.folder if not config.batches.is_in_bucket else None,
        "recording.folder": config.recording.folder,
    }
    return [
        f"{field}={json.dumps(str(Path(path).expanduser().absolute()))}"
        for field, path in paths.items()
        if path is not None and not Path(path).is_absolute()
    ]


def expected_nodes(bootstrap: Path) -> int:
    """Return how many nodes `ray up` starts at least, by what it leaves on the head; 1 where it leaves nothing."""
    try:
        given = yaml.safe_load(bootstrap.read_text(encoding="utf-8"))
        types = given.get("available_node_types") or {}
        num_workers = sum(int(one.get("min_workers") or 0) for one in types.values())
        return 1 + max(num_workers, int(given.get("min_workers") or 0))
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError):
        return 1


def _wait_ready(former: tuple[str, str] | None, has_ended: Callable[[], bool]) -> ClusterRecord:
    ends_s = time.monotonic() + _READY_S
    while time.monotonic() < ends_s:
        time.sleep(_POLL_S)
        if recorded_driver() != former:  # a former one of another version could not be read
            record = read_record()
            if record is not None and record.is_ready:
                return record
        if has_ended():
            raise ResourceError(f"the driver has ended: {_last_words(driver_log())}")
    raise ResourceError(f"the cluster was not ready within {_READY_S:.0f} s; its driver writes to {driver_log()}")


def _last_words(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{path} cannot be read"
    errors = [line for line in lines[-_TAIL_LINES:] if line.startswith("error: ")]
    return f"{errors[-1].removeprefix('error: ')} (see {path})" if errors else f"see {path}"
