"""Looks up what this machine has free for a cluster, and claims its GPUs, which two clusters of a user never share.

A claim is a lock on a file of the user's folder, named after the GPU, and ends with the process that holds it however
that ends. Clusters on a shared Ray claim GPUs there instead (`nodes/ray_nodes.py`).
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from alignedserve.cluster.memory_planner import Machine
from alignedserve.core.errors import ResourceError
from alignedserve.costmodel.gpu_limits import gpu_of
from alignedserve.costmodel.hardware import Hardware
from alignedserve.disk.durable import open_private
from alignedserve.runtime.device.cores import has_native_bfloat16, num_cores
from alignedserve.runtime.device.devices import CUDA, torch_cuda, worker_devices
from alignedserve.runtime.kv.arena_files import arena_folder

_CGROUP = Path("/sys/fs/cgroup")
_MIB = 1024 * 1024
_TOOL_LIMIT_S = 10.0


def this_machine(device: str) -> Machine:
    """Return what is free now; `device` as engine.device. Raises ConfigError for a GPU that is not there."""
    stats = os.statvfs(arena_folder())
    return Machine(
        available_bytes=min(psutil.virtual_memory().available, _left_in_container(_CGROUP)),
        shared_bytes=stats.f_bavail * stats.f_frsize,
        num_cores=num_cores(),
        has_bfloat16=has_native_bfloat16(),
        gpu_bytes=_gpu_bytes(device),
        has_float8=device.startswith(CUDA) and _has_float8(device),
        gpu=_slowest_gpu(device),
    )


def with_gpus(machine: Machine, gpus: Sequence[str], used: Sequence[str]) -> Machine:
    """Return the machine with only some of its GPUs. `gpus`: their names, as `gpu_bytes` counts them."""
    return replace(
        machine, gpu_bytes=tuple(size for gpu, size in zip(gpus, machine.gpu_bytes, strict=True) if gpu in used)
    )


def _left_in_container(folder: Path) -> int:
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control groups, or "max": no limit
        return sys.maxsize
    return max(limit - used + int(stat.get("inactive_file", 0)), 0)


def _gpu_bytes(device: str) -> tuple[int, ...]:
    """Return the free memory of each GPU that workers may use; empty where they compute on the CPU. Asks nvidia-smi,
    which leaves this process without GPU memory; the total where the tool does not answer."""
    if not device.startswith(CUDA):
        return ()
    worker_devices(device, 1)
    free = free_by_uuid()
    gpus = _properties(device)
    return tuple(min(int(gpu.total_memory), free.get(_uuid(gpu), sys.maxsize)) for gpu in gpus)


def _properties(device: str) -> list[Any]:
    _, _, number = device.partition(":")
    used = [int(number)] if number else range(torch_cuda().device_count())
    return [torch_cuda().get_device_properties(index) for index in used]


def _slowest_gpu(device: str) -> Hardware | None:
    gpus = [described_gpu(properties) for properties in _properties(device)] if device.startswith(CUDA) else []
    known = [gpu for gpu in gpus if gpu is not None]
    return min(known, key=lambda gpu: gpu.memory_bytes_per_s) if gpus and len(known) == len(gpus) else None


def described_gpu(properties: Any) -> Hardware | None:
    return gpu_of(
        str(properties.name),
        (properties.major, properties.minor),
        num_multiprocessors=getattr(properties, "multi_processor_count", 0),
        memory_bytes=int(properties.total_memory),
        clock_hz=1e3 * getattr(properties, "clock_rate", 0),  # in kHz
        memory_hz=1e3 * getattr(properties, "memory_clock_rate", 0),
        bus_bits=getattr(properties, "memory_bus_width", 0),
    )


def _has_float8(gpu: str) -> bool:
    from kernels.float8_linear import has_float8_products  # and with it PyTorch, which GPUs alone are asked by

    return has_float8_products(gpu)


def _uuid(gpu: Any) -> str:
    return str(getattr(gpu, "uuid", "")).removeprefix("GPU-")


def free_by_uuid() -> dict[str, int]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(  # noqa: S603  (a program of this machine, by its full path)
            [tool, "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TOOL_LIMIT_S,
        )
        lines = re.findall(r"^GPU-([\w-]+), *(\d{1,9})$", output.stdout, re.MULTILINE)
        return {uuid: int(mebibytes) * _MIB for uuid, mebibytes in lines}
    return {}


class GpusTaken(ResourceError):
    """Other clusters of this host hold every usable GPU."""


class GpuClaims:
    """The GPUs of one cluster; each is another's again when this is closed, or collected."""

    def __init__(self, gpus: tuple[str, ...] = (), descriptors: tuple[int, ...] = ()) -> None:
        self.gpus = gpus
        self._finish = weakref.finalize(self, _close, descriptors)

    def close(self) -> None:
        self._finish()


def claim_gpus(gpus: Sequence[str], folder: Path) -> GpuClaims:
    locks = ((gpu, _lock(folder / f"gpu-{_identity(gpu)}.lock")) for gpu in gpus)
    claimed = {gpu: descriptor for gpu, descriptor in locks if descriptor is not None}
    if gpus and not claimed:
        which = "other clusters on this host have every GPU" if len(gpus) > 1 else f"another cluster has {gpus[0]}"
        raise GpusTaken(f"{which}; stop them, serve all models in one cluster, or set engine.device=cpu")
    return GpuClaims(tuple(claimed), tuple(claimed.values()))


def _lock(path: Path) -> int | None:
    descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _identity(gpu: str) -> str:
    properties = torch_cuda().get_device_properties(gpu)
    return re.sub(r"[^\w-]", "", str(getattr(properties, "uuid", gpu)))
