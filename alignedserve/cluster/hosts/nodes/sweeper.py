"""A small process beside a node's actors that outlives them all: it removes their shared memory and sockets.

Ray kills actors, with `ray stop` all of a node at once, so that none of them can clean up. The sweeper waits on a pipe
for the end of the process that started it, then until the others have ended too: a file is removed when its owner's
lock is free, a socket when nothing listens there any more. It stays until the node's raylet has ended, and ends what
that leaves behind.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from alignedserve.cluster.local_ray.raylet_children import RayletChildren
from alignedserve.process.loading_progress import remove_unused_progress
from alignedserve.runtime.kv.arena_files import ARENA_PREFIX, ARENA_SUFFIX, arena_folder, remove_stale_arenas

_POLL_S = 0.5
_PATIENCE_S = 60.0  # with processes that live on
_REFUSING_S = 0.2


def start_sweeper(folder: Path, raylet_pid: int) -> None:
    """Start the sweeper of a run folder, which outlasts this process, until all is swept and the raylet has ended."""
    reading, writing = os.pipe()  # the writing end stays open until this process ends, however it ends
    command = [sys.executable, "-m", "alignedserve.cluster.hosts.nodes.sweeper", str(folder), str(raylet_pid)]
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
        except OSError:  # such as EAGAIN: it is served, by a process that accepts nothing at the moment
            return True
    return True


def _wait_and_sweep(folder: Path, raylet_pid: int) -> None:
    children = RayletChildren(raylet_pid)
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
