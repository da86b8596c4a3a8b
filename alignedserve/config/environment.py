"""The only reader of environment variables: addresses and secrets, nothing else."""

import os
from pathlib import Path

API_KEYS_VARIABLE = "ALIGNEDSERVE_API_KEYS"
RUN_DIR_VARIABLE = "ALIGNEDSERVE_RUN_DIR"
CLIENT_KEY_VARIABLE = "ALIGNEDSERVE_API_KEY"
RAY_ADDRESS_VARIABLE = "RAY_ADDRESS"


def api_keys() -> tuple[str, ...]:
    """Keys that clients must present, comma-separated in ALIGNEDSERVE_API_KEYS; none: the gateway is open."""
    return tuple(key.strip() for key in os.environ.get(API_KEYS_VARIABLE, "").split(",") if key.strip())


def client_api_key() -> str | None:
    """The key that our own client commands present."""
    return os.environ.get(CLIENT_KEY_VARIABLE) or None


def ray_address() -> str | None:
    """The Ray cluster to join, in Ray's own RAY_ADDRESS; None: start one on this machine."""
    return os.environ.get(RAY_ADDRESS_VARIABLE) or None


def run_root() -> Path:
    """Folder for sockets and logs of running clusters; private to the user."""
    named = os.environ.get(RUN_DIR_VARIABLE)
    if named:
        return Path(named)
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime_dir) / "alignedserve" if runtime_dir else Path(f"/tmp/alignedserve-{os.getuid()}")  # noqa: S108
