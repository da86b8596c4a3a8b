"""Starting Ray on this machine for one cluster alone, or joining the Ray that `ray up` started."""

import logging
import os
import secrets
import socket
from pathlib import Path

import ray
from ray._raylet import Config  # type: ignore[attr-defined]

from alignedserve.cluster.signals import handlers_preserved
from alignedserve.core.errors import ResourceError

_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's smallest; nothing of ours travels through it
_ANSWER_TIMEOUT_S = 5.0
# What Ray's own processes are to know when they start. cluster.yaml says the same for the Ray that it starts.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray notices a lost node in about a second with these, after more than ten seconds without.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # Ray's own choice is 15, with which a single busy program beside us starves every actor for seconds.
    "RAY_worker_niceness": "0",
    # Two workers share the cores: a thread that waits must sleep, not spin.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Every worker sees every GPU of its host and is told its own: memory of another's can then be mapped.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}


def start_ray(folder: Path, namespace: str) -> None:
    """Start Ray's processes; they end with this one. The token that they ask for lies in `folder`. Raises
    ResourceError."""
    os.environ.update(RAY_ENVIRONMENT)
    # Said outright, with a token of this cluster alone: what Ray does by default depends on what ran before.
    token = folder / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    Config.initialize("")  # Ray read its settings when it was imported; this has it read them again
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
        # Ray raises plain Exception when a process of its own is late.
        raise ResourceError(f"Ray did not start: {error}; is this machine overloaded?") from error


def join_ray(address: str, namespace: str) -> None:
    """Join the Ray at this address (host:port, or auto) under its own authentication. Raises ResourceError."""
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():  # Ray itself would go on trying for minutes
            socket.create_connection((host, int(port)), _ANSWER_TIMEOUT_S).close()
        with handlers_preserved():
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ResourceError(
            f"cannot join the Ray cluster at RAY_ADDRESS={address}: {reason}; does it run there, and is RAY_AUTH_MODE "
            "here what it was started with?"
        ) from error
