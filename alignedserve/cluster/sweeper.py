"""A small process beside a node's actors that outlives them all: it removes their shared memory and sockets.

Ray kills actors, with `ray stop` all of a node at once, so that none of them can clean up. The sweeper waits on a pipe
for the end of the process that started it, then until the others have ended too: a file is removed when its owner's
lock is free, a socket when nothing listens there any more. It stays until the node's raylet has ended, and ends what
that leaves behind.
"""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from alignedserve.process.loading_progress import remove_unused_progress
from alignedserve.runtime.kv.arena_files import ARENA_PREFIX, ARENA_SUFFIX, arena_folder, remove_stale_arenas

_END_POLL_S = 0.5
_GRACE_S = 1.0  # for processes that end by themselves


def kill_survivors(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """Kill what does not end by itself within this time."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class KnownChildren:
    """The children of one process, identified by process id and start time; they stay known when their parent ends."""

    def __init__(self, parent_pid: int) -> None:
        self._parent: psutil.Process | None = None
        self._children: set[psutil.Process] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._parent = psutil.Process(parent_pid)
        self.note()

    @property
    def known(self) -> set[psutil.Process]:
        return self._children

    def note(self) -> bool:
        """Note the children that there are now; return whether the parent still runs."""
        if self._parent is None:
            return False
        try:
            if self._parent.status() == psutil.STATUS_ZOMBIE:
                return False
            # Those known are kept: a parent that ends right now has no children any more and is no zombie yet.
            self._children = {child for child in self._children if child.is_running()} | set(self._parent.children())
        except psutil.NoSuchProcess:
            return False
        return True

    def end_with_raylet(self, lock_folder: Path) -> None:
        if self._parent is None:
            return
        path = lock_folder / f"raylet-{self._parent.pid}.lock"
        with path.open("w", encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            while self.note():
                time.sleep(_END_POLL_S)
            kill_survivors(self._children, _GRACE_S)
            path.unlink(missing_ok=True)


_POLL_S = 0.5
_PATIENCE_S = 60.0  # with processes that live on
_REFUSING_S = 0.2


def start_sweeper(folder: Path, raylet_pid: int) -> None:
    """Start the sweeper of a run folder, which outlasts this process, until all is swept and the raylet has ended."""
    reading, writing = os.pipe()  # the writing end stays open until this process ends, however it ends
    command = [sys.executable, "-m", "alignedserve.cluster.sweeper", str(folder), str(raylet_pid)]
    try:
        # It starts another and ends: a child of an actor would be killed by Ray with it.
        subprocess.run(command, stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)  # noqa: S603
    finally:
        os.close(reading)
    os.set_inheritable(writing, False)


def sweep(folder: Path) -> bool:
    """Remove what is left of processes that have ended; return whether nothing more is to come."""
    prefix = f"{ARENA_PREFIX}{folder.name}-"
    remove_stale_arenas(arena_folder(), prefix)
    for path in folder.glob("*.sock"):
        if not _is_served(path):
            path.unlink(missing_ok=True)
    is_loaded = remove_unused_progress(folder)
    return is_loaded and not any(folder.glob("*.sock")) and not any(arena_folder().glob(f"{prefix}*{ARENA_SUFFIX}"))


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_REFUSING_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # EAGAIN and the like: a busy process serves it
            return True
    return True


def _wait_and_sweep(folder: Path, raylet_pid: int) -> None:
    children = KnownChildren(raylet_pid)
    while os.read(0, 1):
        pass
    ends_s = time.monotonic() + _PATIENCE_S
    swept_before = False  # a process that was coming up may have made something since
    while time.monotonic() < ends_s:
        children.note()
        is_swept = sweep(folder)
        if is_swept and swept_before:
            break
        swept_before = is_swept
        time.sleep(_POLL_S)
    children.end_with_raylet(folder.parent)


if __name__ == "__main__":
    if os.fork() == 0:
        os.setsid()
        _wait_and_sweep(Path(sys.argv[1]), int(sys.argv[2]))
