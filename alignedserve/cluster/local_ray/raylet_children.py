"""Ends what a raylet leaves behind: agents of Ray's that wait for ever for a head that has gone.

`ray down` stops Ray on the head alone. The raylets of other hosts end when they have missed the head for a minute. Two
agents of each would report that to the head before they end as well, and do not give up.
"""

import contextlib
import fcntl
import time
from pathlib import Path

import psutil

_POLL_S = 0.5
_GRACE_S = 1.0  # for processes that end by themselves


class RayletChildren:
    """The processes that one raylet has started; they are known by when they began as well as by their ids."""

    def __init__(self, raylet_pid: int) -> None:
        self._raylet: psutil.Process | None = None
        self._children: set[psutil.Process] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._raylet = psutil.Process(raylet_pid)
        self.note()

    @property
    def known(self) -> set[psutil.Process]:
        return self._children

    def note(self) -> bool:
        """Note the processes that there are now; return whether the raylet still runs."""
        if self._raylet is None:
            return False
        try:
            if self._raylet.status() == psutil.STATUS_ZOMBIE:
                return False
            # Those known are kept: a raylet that ends right now has no children any more and is no zombie yet.
            self._children = {child for child in self._children if child.is_running()} | set(self._raylet.children())
        except psutil.NoSuchProcess:
            return False
        return True

    def end_with_raylet(self, lock_folder: Path) -> None:
        """Wait for the raylet's end and kill what outlives it, unless another process does that for this raylet."""
        if self._raylet is None:
            return
        path = lock_folder / f"raylet-{self._raylet.pid}.lock"
        with path.open("w", encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            while self.note():
                time.sleep(_POLL_S)
            self._kill_rest()
            path.unlink(missing_ok=True)

    def _kill_rest(self) -> None:
        _, alive = psutil.wait_procs(self._children, timeout=_GRACE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
