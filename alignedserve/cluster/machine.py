"""Looks up what this machine has free for a cluster."""

import os
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from alignedserve.cluster.memory_planner import Machine
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.devices import CUDA, worker_devices
from alignedserve.runtime.device.dtypes import has_native_bfloat16
from alignedserve.runtime.kv.arena_files import arena_folder
from kernels.float8_linear import has_float8_products

_CGROUP = Path("/sys/fs/cgroup")
_CUDA: Any = torch.cuda


def this_machine(device: str) -> Machine:
    """Return what is free now; `device` as engine.device. Raises ConfigError for a GPU that is not there."""
    stats = os.statvfs(arena_folder())
    return Machine(
        available_bytes=_available_bytes(),
        shared_bytes=stats.f_bavail * stats.f_frsize,
        num_cores=num_cores(),
        has_bfloat16=has_native_bfloat16(),
        gpu_bytes=_gpu_bytes(device),
        has_float8=device.startswith(CUDA) and has_float8_products(device),
    )


def _available_bytes() -> int:
    """Return the memory that can be had, by the system and by the limit of a container."""
    return min(psutil.virtual_memory().available, _left_in_container(_CGROUP))


def _left_in_container(folder: Path) -> int:
    """Return what the control group at `folder` may still take, its page cache included; endless without a limit."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control groups, or "max": no limit
        return sys.maxsize
    return max(limit - used + int(stat.get("inactive_file", 0)), 0)


def _gpu_bytes(device: str) -> tuple[int, ...]:
    """Return the memory of each GPU that workers may use; none where they compute on the CPU."""
    if not device.startswith(CUDA):
        return ()
    worker_devices(device, 1)
    _, _, number = device.partition(":")
    used = [int(number)] if number else range(torch.cuda.device_count())
    return tuple(int(_CUDA.get_device_properties(index).total_memory) for index in used)
