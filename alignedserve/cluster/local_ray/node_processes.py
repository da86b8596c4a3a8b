"""Ray's two processes of this host, on which every actor depends, and the end of what they leave behind."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants

_ANSWER_S = 2.0
_KILLED_S = 5.0  # for what was killed to be gone
# As Ray calls them, and as a reader of our messages does.
_NAMES = {
    ray_constants.PROCESS_TYPE_GCS_SERVER: "Ray's head process (gcs_server)",
    ray_constants.PROCESS_TYPE_RAYLET: "Ray's node process (raylet)",
}


@dataclass(frozen=True, slots=True)
class NodeProcesses:
    """Ray's processes of one host."""

    by_name: Mapping[str, subprocess.Popen[bytes]]  # as messages call them, the node process last
    ask: Callable[[], bool | None]  # whether the head takes the node for alive; None: it does not answer. May wait

    @classmethod
    def of(cls, node: Any) -> "NodeProcesses":
        client, node_id = node.get_gcs_client(), ray.NodeID.from_hex(node.node_id)

        def ask() -> bool | None:
            try:
                (is_alive,) = client.check_alive([node_id], timeout=_ANSWER_S)
            except Exception:  # noqa: BLE001  Ray has several kinds for a head that does not answer
                return None
            return bool(is_alive)

        return cls({name: node.all_processes[kind][0].process for kind, name in _NAMES.items()}, ask)

    @property
    def raylet_pid(self) -> int:
        return [*self.by_name.values()][-1].pid

    def ended(self) -> str | None:
        """Return which of them has ended and how, in words; None: neither has."""
        for name, process in self.by_name.items():
            code = process.poll()
            if code is not None:
                return f"{name} has ended " + (f"by signal {-code}" if code < 0 else f"with code {code}")
        return None


def orphans_of(folder: Path) -> list[psutil.Process]:
    """Return processes that Ray has started with the token in a cluster's folder, and that nobody here has any more.

    An interrupted start of Ray ends its node process, and leaves the agents that this one has just started. On Linux.
    """
    own = psutil.Process()
    had = {own, *own.children(recursive=True)}
    token = f"RAY_AUTH_TOKEN_PATH={folder}{os.sep}".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # of another user, or gone
            # Not by psutil, which reads no further than where an agent that names itself has overwritten it.
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if process not in had and any(variable.startswith(token) for variable in variables):
                found.append(process)
    return found


def kill_all(processes: Iterable[psutil.Process]) -> None:
    found = dict.fromkeys(processes)
    for process in tuple(found):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= dict.fromkeys(process.children(recursive=True))
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=_KILLED_S)
