"""What schedules are run against: processes by role, and what is seen of them from outside."""

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Protocol

from benchmarks.chaos.schedules import Target

_ZEROS = (
    "alignedserve_pool_blocks_used",
    "alignedserve_worker_blocks_used",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)


class Site(Protocol):
    """A cluster that can be hurt. Call `start` once and `stop` once."""

    model: str  # the name that requests have to say
    has_small_disks: bool  # its disks are small, and nobody else's: they may be filled

    @property
    def url(self) -> str:
        """Return the address of its gateway."""

    @property
    def run_folder(self) -> Path:
        """Return the folder of its sockets."""

    @property
    def state_folder(self) -> Path:
        """Return the folder of its batches."""

    @property
    def log_folder(self) -> Path:
        """Return the folder of its logs."""

    def start(self) -> None:
        """Start everything; return when it is ready."""

    def stop(self) -> None:
        """End everything."""

    def pid(self, target: Target) -> int | None:
        """Return the id of the process of this role; None while there is none."""

    def socket_path(self, target: Target) -> Path:
        """Return where the process of this role listens, if it does."""

    def clock_path(self, target: Target) -> Path | None:
        """Return the file that says how far the clock of this process is off; None: it cannot be set."""

    def drain(self, target: Target, *, begins: bool) -> None:
        """Let the process of this role drain, or no more."""

    def arenas(self) -> list[Path]:
        """Return its files in shared memory."""

    def tail(self) -> str:
        """Return the last lines of every log."""


def ask(site: Site, path: str, body: Any = None, timeout_s: float = 5.0) -> tuple[int, str]:
    """Return status and body of one answer of the gateway; status 0 without one."""
    content = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "connection": "close"}
    request = urllib.request.Request(site.url + path, content, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""


def held_by(site: Site) -> dict[str, float]:
    """Return what is in use though nothing runs: blocks and requests by metric; empty where nothing is."""
    status, text = ask(site, "/metrics")
    if status != 200:
        return {"no metrics": float(status)}
    values = dict.fromkeys(_ZEROS, -1.0)
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in values:
            values[name] = max(values[name], 0.0) + float(line.rpartition(" ")[2])
    return {name: value for name, value in values.items() if value}
