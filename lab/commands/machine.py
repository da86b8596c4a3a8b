"""Description of the machine that a measurement was made on, written down with it."""

import os
import platform
import sys
from importlib.metadata import version
from typing import Any

from alignedserve.runtime.device.cores import num_cores, processor_name
from alignedserve.runtime.device.devices import described, driver_version, version_of, visible_gpus


def describe_machine() -> dict[str, Any]:
    """Return processor, usable cores, their load, and the versions that matter; the GPUs where PyTorch, if it is
    loaded, can use them. Plain JSON."""
    machine = {
        "cpu": processor_name(),
        "cores": num_cores(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    torch = sys.modules.get("torch")  # to load it takes seconds; who has measured on a GPU has done so
    return machine if torch is None or not torch.cuda.is_available() else {**machine, **_describe_gpus(torch)}


def _describe_gpus(torch: Any) -> dict[str, Any]:
    return {
        "gpus": described(visible_gpus()),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
        "flash_attn": version_of("flash-attn"),
        "flash_attn_4": version_of("flash-attn-4"),
    }
