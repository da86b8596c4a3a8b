"""Lets processes that are forked from this one compute with a model of their own.

A fork copies the calling thread alone, and the record of the OpenMP threads that have worked for it: the first parallel
loop in the new process would wait for them for ever. So they end before a fork, and the next loop of either process
starts others.
"""

import ctypes
import os

_SOFT = 1  # omp_pause_soft: ends the threads, and keeps what was set


def let_forks_compute() -> None:
    """See to it in this process and in all that are forked from it; to be called once."""
    os.register_at_fork(before=_end_openmp_threads)


def _end_openmp_threads() -> None:
    end = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if end is not None:
        end(_SOFT)
