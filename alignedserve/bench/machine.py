"""What a measurement was made on, to be written down with it."""

import os
import platform
from importlib.metadata import version
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Processor, usable cores, how busy they were, and the versions that matter. Plain JSON."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.processor()
