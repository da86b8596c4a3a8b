"""Notices within seconds that Ray's processes on this host are lost: actors serve on, but none is started again.

A process that has ended is seen at the next look. One that is silent is waited for, by looks and not by seconds: it may
be stopped or starved for a while, and so may this process.
"""

import logging
import threading
from collections.abc import Callable

import psutil

from alignedserve.cluster.local_ray.node_processes import NodeProcesses
from alignedserve.cluster.local_ray.raylet_children import RayletChildren

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
        self._children = RayletChildren(processes.raylet_pid)
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
        return self._children.known

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def look(self) -> str | None:
        self._children.note()
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
