"""Finds the processes that a process has started, and tells those that have ended."""

from contextlib import suppress

import psutil


def children_running(module: str, process: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the children that run a module, by the last part of its name; of this process unless one is given."""
    found = []
    for child in (process or psutil.Process()).children():
        with suppress(psutil.NoSuchProcess):  # it has ended, perhaps for whoever started it to see
            if any(part.endswith(module) for part in child.cmdline()):
                found.append(child)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process runs no more; its parent may have yet to wait for it, or do so at this moment."""
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True
