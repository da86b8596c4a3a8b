"""How the workers of a machine share its cores."""

import os


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_per_worker(num_workers: int) -> int:
    """Computing threads of each of so many workers on this machine.

    More computing threads than cores are worse than idle cores: a forward pass waits at every layer for all of its
    threads, and one that another worker has displaced holds it up for whole time slices.
    """
    return max(1, num_cores() // num_workers)
