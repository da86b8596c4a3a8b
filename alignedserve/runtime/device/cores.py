"""CPU cores, and their division among the workers of a machine."""

import os


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_per_worker(num_workers: int) -> int:
    """Return the computing threads of each of so many workers on this machine.

    More computing threads than cores are worse than idle cores: a forward pass waits at every layer for all of its
    threads, and a thread that another worker has preempted delays it by whole time slices.
    """
    return max(1, num_cores() // num_workers)
