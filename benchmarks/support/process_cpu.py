"""CPU seconds of the processes below some others, by what they do."""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping

import psutil

# The first that is found in a command line says what the process is.
_KINDS = (
    ("ColocatedWorker", "workers"),
    ("DecodeWorker", "workers"),
    ("PrefillWorker", "workers"),
    ("KvPool", "pools"),
    ("Gateway", "gateways"),
    ("RouterActor", "router"),
    ("NodeKeeper", "keepers"),
    ("gcs_server", "Ray's head"),
    ("raylet/raylet", "raylets"),
    ("Agent", "Ray's agents"),
    ("autoscaler/_private/monitor", "Ray's autoscaler"),
    ("ray.util.client", "Ray's client server"),
    ("ray::", "idle workers of Ray"),
    ("alignedserve", "driver and supervisor"),
)


def cpu_seconds(roots: Iterable[int]) -> Mapping[tuple[int, str], float]:
    """Return the CPU seconds so far of everything that these processes have started, by process id and kind."""
    found: dict[tuple[int, str], float] = {}
    for root in roots:
        for process in psutil.Process(root).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                times = process.cpu_times()
                found[process.pid, kind_of(" ".join(process.cmdline()))] = times.user + times.system
    return found


def kind_of(command_line: str) -> str:
    """Return what a process with this command line does."""
    return next((kind for part, kind in _KINDS if part in command_line), "others")


def spent(before: Mapping[tuple[int, str], float], after: Mapping[tuple[int, str], float]) -> dict[str, float]:
    """Return the CPU seconds between two readings by kind; what a process spent that ended meanwhile is not counted."""
    seconds: dict[str, float] = defaultdict(float)
    for (pid, kind), total in after.items():
        seconds[kind] += total - before.get((pid, kind), 0.0)
    return {kind: round(value, 3) for kind, value in sorted(seconds.items(), key=lambda entry: -entry[1])}
