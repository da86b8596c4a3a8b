"""Finds the processes that a process has started."""

import psutil


def children_running(module: str, process: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the children that run a module, by the last part of its name; of this process unless one is given."""
    children = (process or psutil.Process()).children()
    return [child for child in children if any(part.endswith(module) for part in child.cmdline())]
