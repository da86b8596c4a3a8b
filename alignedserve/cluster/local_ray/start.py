"""Starts Ray on this machine for one cluster: closed to other machines and users, without unused processes.

Ray listens at all addresses unless its node has the loopback address, which `ray.init` never gives it on Linux: it is
started as on macOS, where it has. Its folder is in the cluster's, which nobody else can enter.
"""

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services, worker
from ray._private.node import Node
from ray._raylet import Config  # type: ignore[attr-defined]

from alignedserve.cluster.local_ray.node_watch import NodeProcesses
from alignedserve.cluster.local_ray.worker_template import WorkerTemplate
from alignedserve.cluster.ray_node import RAY_ENVIRONMENT
from alignedserve.cluster.signals import handlers_preserved
from alignedserve.config.environment import RUN_DIR_VARIABLE, SPIN_VARIABLE
from alignedserve.core.errors import ResourceError
from alignedserve.process.logs import LossyFileHandler

_MAX_BYTES = 4 << 20
_ORDERS = "workers.sock"  # in the cluster's folder
_FORK_WORKER = Path(__file__).with_name("fork_worker.py")
_logger = logging.getLogger(f"{__name__}.said")  # of its own: it goes nowhere else


class _MessageFile(LossyFileHandler, RotatingFileHandler): ...


def keep_messages(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = _MessageFile(path, maxBytes=_MAX_BYTES, backupCount=1, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for former in tuple(_logger.handlers):
        _logger.removeHandler(former)
        former.close()
    _logger.addHandler(handler)
    _logger.propagate = False
    _logger.setLevel(logging.INFO)
    worker.print_to_stdstream = _log


def _log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    for text in data.get("lines", ()):
        _logger.info("%s: %s", data.get("pid", "ray"), text)


_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum; the cluster does not use it
# Methods of Ray's node: the autoscaler's monitor, the server of the dashboard and of jobs, and what reads the logs of
# workers out to drivers. `ray.init` has no options against them; they take a second of a start, and 200 MB.
_UNUSED_PROCESSES = ("start_monitor", "start_api_server", "start_log_monitor")
# On one host the end of a process is seen at once (NodeWatch). A node process that is silent is starved or stopped for
# a while: were it given up, every actor would end with it.
_PATIENT = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "12",
    # Ray ends a process without a word that has missed its head for so long; NodeWatch gives up before.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    # A driver does not wait for processes that Ray starts ahead of it, and actors start all at once.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_maximum_startup_concurrency": "16",
    # Of one log of Ray's: they are in the cluster's folder, which may be in memory.
    "RAY_ROTATION_MAX_BYTES": str(4 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
}


def start_ray(folder: Path, namespace: str, template: WorkerTemplate | None = None) -> NodeProcesses:
    """Start Ray's processes, which end with this one; `folder` gets their sockets, logs and token. `template`: forks
    the workers; None: Ray starts them. Raises ResourceError."""
    if not str(folder).isascii():
        raise ResourceError(f"Ray takes no folder such as {folder.parent}; set {RUN_DIR_VARIABLE} to one in ASCII")
    orders = folder / _ORDERS
    is_forking = template is not None and template.listen(orders)
    set_already = {SPIN_VARIABLE: os.environ[SPIN_VARIABLE]} if SPIN_VARIABLE in os.environ else {}
    os.environ.update(RAY_ENVIRONMENT | _PATIENT | set_already)
    # Set explicitly, with a token of this cluster: Ray's default depends on what ran before.
    token = folder / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    Config.initialize("")  # Ray reads settings at import; read them again
    try:
        with handlers_preserved(), _restrained(folder, orders if is_forking else None):
            ray.init(
                address="local",
                namespace=namespace,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(folder / "ray"),
            )
    except Exception as error:
        raise ResourceError(f"Ray did not start: {error}{_question(error)}") from error
    keep_messages(folder / "logs" / "ray.log")
    return NodeProcesses.of(worker._global_node, template.pid if template is not None else None)


def _question(error: Exception) -> str:
    says_why = isinstance(error, OSError | ValueError) and not isinstance(error, TimeoutError)  # a full disk, say
    return "" if says_why else "; is this machine overloaded?"


@contextlib.contextmanager
def _restrained(folder: Path, orders: Path | None = None) -> Iterator[None]:
    """Let Ray start on loopback, with sockets in this folder and no process or server that one host has no use for.
    `orders`: where the template of workers listens."""

    def socket_path(node: Node, path: str | None, default_prefix: str) -> str:
        return str(folder / f"{default_prefix}.sock")

    replaced: list[tuple[Any, str, Any]] = [
        *((Node, name, _start_nothing) for name in _UNUSED_PROCESSES),
        (Node, "_prepare_socket_file", socket_path),
        (ray_constants, "ENABLE_RAY_CLUSTER", False),  # every server on loopback alone
        (services, "_build_python_executable_command_memory_profileable", _idle_agent),
    ]
    if orders is not None:
        # Ray writes what this returns between the interpreter and the worker's own words.
        replaced.append((services, "_site_flags", lambda: ["-I", "-S", str(_FORK_WORKER), str(orders)]))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, instead in replaced:
        setattr(owner, name, instead)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _idle_agent(component: str, session_dir: str, unbuffered: bool = True) -> list[str]:
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("idle_agent.py")), component]


def _start_nothing(node: Node, **_: object) -> None: ...
