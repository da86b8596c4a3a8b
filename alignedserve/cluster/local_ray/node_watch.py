"""Notices within seconds that Ray's processes on this host are lost: actors serve on, but none is started again.

A process that has ended is seen at the next look. One that is silent is waited for, by looks and not by seconds: it may
be stopped or starved for a while, and so may this process.
"""

import contextlib
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants

from alignedserve.cluster.sweeper import KnownChildren

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
    parent_pids: Sequence[int]  # processes that start workers: the node process, and the template if there is one

    @classmethod
    def of(cls, node: Any, template_pid: int | None) -> "NodeProcesses":
        client, node_id = node.get_gcs_client(), ray.NodeID.from_hex(node.node_id)

        def ask() -> bool | None:
            try:
                (is_alive,) = client.check_alive([node_id], timeout=_ANSWER_S)
            except Exception:  # noqa: BLE001  Ray has several kinds for a head that does not answer
                return None
            return bool(is_alive)

        by_name = {name: node.all_processes[kind][0].process for kind, name in _NAMES.items()}
        raylet_pid = [*by_name.values()][-1].pid
        return cls(by_name, ask, [raylet_pid] if template_pid is None else [raylet_pid, template_pid])

    def ended(self) -> str | None:
        """Return which of them has ended and how, in words; None: neither has."""
        for name, process in self.by_name.items():
            code = process.poll()
            if code is not None:
                return f"{name} has ended " + (f"by signal {-code}" if code < 0 else f"with code {code}")
        return None


def orphans_of(folder: Path) -> list[psutil.Process]:
    """Return processes that Ray has started with the token in a cluster's folder, and that nobody here has any more. An
    interrupted start of Ray ends its node process, and leaves the agents that this one has just started. On Linux."""
    this_process = psutil.Process()
    had = {this_process, *this_process.children(recursive=True)}
    token = os.fsencode(f"RAY_AUTH_TOKEN_PATH={folder}{os.sep}")
    orphans = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # of another user, or gone
            # Not by psutil, which reads no further than where an agent that names itself has overwritten it.
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if process not in had and any(variable.startswith(token) for variable in variables):
                orphans.append(process)
    return orphans


def kill_all(processes: Iterable[psutil.Process]) -> None:
    family = dict.fromkeys(processes)
    for process in tuple(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            family |= dict.fromkeys(process.children(recursive=True))
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=_KILLED_S)


logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_MAX_SILENT_LOOKS = 20  # each waits for two seconds besides: a minute
_UNHEEDED_S = 20.0  # after which whoever drives the cluster hangs in a call of Ray's


class NodeWatch:
    """Looks after Ray's processes on a thread of its own. `start` once, `stop` before they are ended on purpose."""

    def __init__(self, processes: NodeProcesses, on_unheeded: Callable[[str], None]) -> None:
        """`on_unheeded`: called with the problem, on that thread, where nobody stops the watch after a loss."""
        self._processes = processes
        self._on_unheeded = on_unheeded
        self._families = [KnownChildren(pid) for pid in processes.parent_pids]
        self._num_silent = 0
        self._problem: str | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    @property
    def problem(self) -> str | None:
        """Return why Ray is lost on this host; None: it is not. It never comes back."""
        return self._problem

    @property
    def children(self) -> set[psutil.Process]:
        return {child for family in self._families for child in family.known}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def look(self) -> str | None:
        for family in self._families:
            family.note()
        self._problem = self._processes.ended() or self._silence()
        return self._problem

    def _run(self) -> None:
        while not self._is_stopping.wait(_LOOK_S):
            problem = self.look()
            if problem is not None:
                logger.debug("%s", problem)
                if not self._is_stopping.wait(_UNHEEDED_S):
                    self._on_unheeded(problem)
                return

    def _silence(self) -> str | None:
        is_alive = self._processes.ask()
        self._num_silent = 0 if is_alive is not None else self._num_silent + 1
        if is_alive is False:
            return "Ray's node process (raylet) has not answered for a minute and is given up"
        if self._num_silent >= _MAX_SILENT_LOOKS:
            return f"Ray's head process (gcs_server) has not answered {self._num_silent} times and is given up"
        return None
