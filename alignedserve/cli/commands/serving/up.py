"""`alignedserve up`: serve on the nodes of the Ray cluster that runs here, also after this shell has ended."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from rich.markup import escape
from rich.table import Table

from alignedserve.cli.console import notes, results
from alignedserve.cli.keys.commands import check_keys, warn_of_strangers
from alignedserve.cli.options import ServeOptions
from alignedserve.cluster.hosts.orders import connected
from alignedserve.cluster.hosts.record import ClusterRecord, read_record, recorded_drain_s, recorded_driver
from alignedserve.cluster.hosts.supervisor import driver_log, end_supervisor, start_supervisor
from alignedserve.config.environment import ray_address
from alignedserve.config.model_settings import ModelSettings, load_models, name_of
from alignedserve.config.overrides import override_of
from alignedserve.core.errors import ResourceError
from alignedserve.runtime.model.named_models import POCKET
from alignedserve.scheduling.factory import require_effect

_READY_S = 900.0
_POLL_S = 0.5
_TAIL_LINES = 15
_BOOTSTRAP_NAME = "ray_bootstrap_config.yaml"  # in the head's home


def up(options: ServeOptions) -> None:
    """Start the supervisor of a driver, in place of any former one, and wait until the cluster answers. Raises an error
    of the tree, with the driver's last words, when it does not."""
    settings = load_models(options.config, options.all_overrides, options.named_models)
    for config in settings.configs:
        check_keys(config.gateway)
        require_effect(config)  # a mistake is reported here, not in a log
    config = settings.configs[0]
    warn_of_strangers(config.gateway)
    with connected():
        end_supervisor(drain_s=recorded_drain_s())
        former = recorded_driver()
        supervisor = start_supervisor(driver_command(options, settings), ray_address() or "auto")
        with notes().status("Starting the cluster …"):
            record = _wait_ready(former, lambda: supervisor.poll() is not None)
    results().print(urls_of(record))


def urls_of(record: ClusterRecord) -> Table:
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


def driver_command(options: ServeOptions, settings: ModelSettings) -> list[str]:
    """Return the driver's command line: that of `serve`, with paths as seen from any folder. `settings`: what the
    options amount to, seen from the folder of this shell."""
    command = [sys.executable, "-m", "alignedserve", "serve"]
    command += [_absolute_argument(model) for model in options.named_models]
    if options.config is not None:
        command += ["--config", str(options.config.absolute())]
    for override in (*options.all_overrides, *_absolute_paths(settings, is_named=bool(options.named_models))):
        command += ["--set", override]
    return [*command, "--nodes", str(options.nodes or expected_nodes(Path.home() / _BOOTSTRAP_NAME))]


def _absolute_argument(model: str) -> str:
    name, separator, path = ("", "", model) if Path(model).exists() else model.rpartition("=")
    return f"{name}{separator}{_absolute(path) if _is_local(path) else path}"


def _absolute_paths(settings: ModelSettings, *, is_named: bool) -> list[str]:
    """Return overrides for paths that mean something else in the driver's folder, which is not the shell's. `is_named`:
    the models are arguments of the command line, and no settings."""
    config = settings.configs[0]
    paths: dict[str, str | None] = {
        "batches.folder": config.batches.folder if not config.batches.is_in_bucket else None,
        "recording.folder": config.recording.folder,
    }
    if not is_named:
        prefixes = [""] if len(settings.own) == 1 else [f"{name_of(sections)}." for sections in settings.own]
        models = [config.model.path for config in settings.configs]
        paths |= {
            f"{prefix}model.path": path if _is_local(path) else None
            for prefix, path in zip(prefixes, models, strict=True)
        }
    return [
        override_of(field, _absolute(path))
        for field, path in paths.items()
        if path is not None and not Path(path).is_absolute()
    ]


def _is_local(model: str) -> bool:
    return model != POCKET and Path(model).exists()


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def expected_nodes(bootstrap: Path) -> int:
    try:
        document = yaml.safe_load(bootstrap.read_text(encoding="utf-8"))
        types = document.get("available_node_types") or {}
        num_workers = sum(int(node_type.get("min_workers") or 0) for node_type in types.values())
        return 1 + max(num_workers, int(document.get("min_workers") or 0))
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
