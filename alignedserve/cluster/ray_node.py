"""Starts Ray on this machine for one cluster, or joins the Ray cluster that `ray up` started."""

import logging
import os
import secrets
import socket
from pathlib import Path

import ray
from ray._raylet import Config  # type: ignore[attr-defined]

from alignedserve.cluster.signals import handlers_preserved
from alignedserve.config.environment import SHORT_SPINS, SPIN_VARIABLE
from alignedserve.core.errors import ResourceError

_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum; the cluster does not use it
_ANSWER_TIMEOUT_S = 5.0
# Environment of Ray's own processes. cluster.yaml sets the same for the Ray that it starts.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray notices a lost node in about a second with these, after more than ten seconds without.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # Off: Ray would kill actors, several at a time, whenever 95 % of this machine's memory is in use, by any program.
    # Our sizes are planned with memory to spare; where it is short, the kernel ends Ray's workers first.
    "RAY_memory_monitor_refresh_ms": "0",
    # Off: every node would have a page of metrics that answers anyone, at all addresses. Ours are at the gateways.
    "RAY_enable_metrics_collection": "0",
    # Ray's default is 15, with which a single busy program on this machine starves every actor for seconds.
    "RAY_worker_niceness": "0",
    # Workers share the cores with others: a thread that waits spins for microseconds and then sleeps. Sleeping at once
    # costs a system call per product.
    SPIN_VARIABLE: SHORT_SPINS,
    # Every worker sees every GPU of its host, so that it can map the memory of others.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}


def start_ray(folder: Path, namespace: str) -> None:
    """Start Ray's processes, which end with this one; `folder` gets their token. Raises ResourceError."""
    set_already = {SPIN_VARIABLE: os.environ[SPIN_VARIABLE]} if SPIN_VARIABLE in os.environ else {}
    os.environ.update(RAY_ENVIRONMENT | set_already)
    # Set explicitly, with a token of this cluster: Ray's default depends on what ran before.
    token = folder / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    Config.initialize("")  # Ray read its settings when imported; this reads them again
    try:
        with handlers_preserved():
            ray.init(
                address="local",
                namespace=namespace,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
            )
    except Exception as error:
        # Ray raises a plain Exception if one of its processes is late.
        raise ResourceError(f"Ray did not start: {error}; is this machine overloaded?") from error


def join_ray(address: str, namespace: str) -> None:
    """Join the Ray at this address (host:port, or auto) under its own authentication. Raises ResourceError."""
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():  # Ray itself would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_TIMEOUT_S).close()
        with handlers_preserved():
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ResourceError(
            f"cannot join the Ray cluster at RAY_ADDRESS={address}: {reason}; does it run there, and are RAY_AUTH_MODE "
            "and the token (RAY_AUTH_TOKEN, else ~/.ray/auth_token) here those it was started with?"
        ) from error
