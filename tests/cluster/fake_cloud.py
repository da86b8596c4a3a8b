"""A Ray with an autoscaler and without a cloud: its nodes are processes of this host (Ray's fake_multinode)."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from ray.util import get_node_ip_address

from alignedserve.cluster.ray_node import RAY_ENVIRONMENT
from tests.support.ports import free_port

_HEAD_ID = f"{0:056x}".replace("0", "f", 51)  # the node of the head, as the provider knows it
_UP_S = 120.0
_NEW_NODES = {"CPU": 2}


def autoscaler_file(gcs_address: str, num_workers: int, idle_minutes: float) -> dict[str, Any]:
    """Return the autoscaler's whole file. Nodes of one address are told apart by their ids, else none is ever idle."""
    lists = ("rsync_exclude", "rsync_filter", "cluster_synced_files", "initialization_commands", "setup_commands")
    kinds = ("head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
    provider = {
        "type": "fake_multinode",
        "gcs_address": gcs_address,
        "head_node_id": _HEAD_ID,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    worker = {"resources": _NEW_NODES, "node_config": {}, "min_workers": 0, "max_workers": num_workers}
    return {
        "cluster_name": "fake",
        "max_workers": num_workers,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle_minutes,
        "provider": provider,
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
            "worker": worker,
        },
        "head_node_type": "ray.head.default",
        "file_mounts_sync_continuously": False,
        **{name: {} for name in ("docker", "auth", "file_mounts", "head_node", "worker_nodes")},
        **{name: [] for name in (*lists, *kinds)},
    }


@contextlib.contextmanager
def fake_cloud(num_workers: int, idle_minutes: float) -> Iterator[dict[str, str]]:
    """Start Ray's head, which can add so many nodes; give the environment of processes that join it."""
    folder = Path(tempfile.mkdtemp(prefix="cloud-", dir="/tmp"))  # Ray's sockets need a short path
    address = f"{get_node_ip_address()}:{free_port()}"  # type: ignore[no-untyped-call]
    (folder / "scaling.yaml").write_text(json.dumps(autoscaler_file(address, num_workers, idle_minutes)))
    (folder / "token").write_text(secrets.token_hex(32))
    (folder / "token").chmod(0o600)
    joining = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    of_head = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID, "RAY_CLOUD_INSTANCE_ID": _HEAD_ID}
    of_autoscaler = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "AUTOSCALER_METRIC_PORT": "-1",  # as in cluster.yaml
        "RAY_enable_autoscaler_v2": "0",
        "RAY_NODE_TYPE_NAME": "ray.head.default",
    }
    command = [
        *(
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            f"--port={address.rpartition(':')[2]}",
            f"--temp-dir={folder}/ray",
        ),
        *("--num-cpus=2", "--include-dashboard=false", "--object-store-memory=83886080", "--disable-usage-stats"),
        f"--autoscaling-config={folder}/scaling.yaml",
    ]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(
            command,
            env=inherited | RAY_ENVIRONMENT | joining | of_head | of_autoscaler,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait_for(address, head, folder / "head.log")
        yield joining
    finally:
        started = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
        head.terminate()
        for process in [*started, *_of_folder(folder)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait(30.0)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(address: str, head: "subprocess.Popen[bytes]", log: Path) -> None:
    host, _, port = address.rpartition(":")
    ends_s = time.monotonic() + _UP_S
    while "Ray runtime started" not in log.read_text(errors="replace"):
        assert head.poll() is None, log.read_text()
        assert time.monotonic() < ends_s, log.read_text()
        time.sleep(0.2)
    socket.create_connection((host, int(port)), 5.0).close()


def _of_folder(folder: Path) -> list[psutil.Process]:
    """Return what Ray has started for this cluster: its processes have its folder in their command lines."""
    processes = psutil.process_iter(["cmdline"])
    return [one for one in processes if any(str(folder) in argument for argument in one.info["cmdline"] or [])]
