"""CPU cores, what processor they are of, and their division among the workers of a machine."""

import os
import platform
from pathlib import Path

from kernels.cpu.native import supported_levels

_CPU_INFO = Path("/proc/cpuinfo")
_MOST_PER_COPY = 4
_CORES_PER_COPYING_THREAD = 8


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def threads_per_worker(num_workers: int) -> int:
    """Return how many computing threads each of these workers has on this machine. More computing threads than cores
    are worse than idle cores: a forward pass waits at every layer for all of its threads, and a thread that another
    worker has preempted delays it by whole time slices."""
    return max(1, num_cores() // num_workers)


def threads_per_copy() -> int:
    """Return the threads of a copy of many blocks: a core in eight, four at most. One thread copies at the speed of one
    core, a fraction of what the memory of a large machine allows. Copies run beside iterations, and several at a time,
    so they take few cores."""
    return max(1, min(_MOST_PER_COPY, num_cores() // _CORES_PER_COPYING_THREAD))


def has_native_bfloat16() -> bool:
    return "avx512bf16" in supported_levels()
