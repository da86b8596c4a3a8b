"""The devices of this machine: which one a worker computes on, and why a GPU cannot be had."""

import warnings
from typing import Any

import psutil
import torch

from alignedserve.core.errors import ConfigError

CPU, CUDA = "cpu", "cuda"
_CUDA: Any = torch.cuda


def cuda_obstacle() -> str | None:
    """Why no GPU can be used, in one line; None: one can. Takes no memory on it."""
    if torch.version.cuda is None:
        return "this PyTorch is built for CPUs alone; docs/gpu.md says how to install one with CUDA"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_gpu = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if has_gpu:
        return None
    # PyTorch only warns of a driver that is too old, or of one that does not answer.
    said = [str(warning.message).strip().partition("\n")[0] for warning in caught]
    return said[0][:300] if said else "no NVIDIA GPU is visible here; does nvidia-smi show one?"


def worker_devices(name: str, num_workers: int) -> list[str]:
    """The device of each worker, by engine.device. Raises ConfigError saying why it cannot be had.

    `auto` is the CPU: the GPU path has not been measured on a GPU yet, so it computes only where it is asked for.
    """
    if not name.startswith(CUDA):
        return [CPU] * num_workers
    obstacle = cuda_obstacle()
    if obstacle is not None:
        raise ConfigError(f"engine.device is {name}, but {obstacle}")
    count = torch.cuda.device_count()
    _, _, number = name.partition(":")
    if number and int(number) >= count:
        raise ConfigError(f"engine.device is {name}, but the last GPU here is cuda:{count - 1}")
    return [name if number else f"{CUDA}:{index % count}" for index in range(num_workers)]


def free_bytes(device: torch.device) -> int:
    """Memory that is left on the device."""
    if device.type == CUDA:
        free, _ = _CUDA.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


def use_device(device: torch.device) -> None:
    """Make it the calling thread's. Otherwise a thread's is the first GPU, and page-locked memory, which belongs to no
    device, would take a few hundred megabytes of that one for each process that computes on another."""
    if device.type == CUDA and device.index is not None:
        _CUDA.set_device(device)


def describe_gpus() -> list[str]:
    """One line for each GPU that can be used."""
    if cuda_obstacle() is not None:
        return []
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 1024**3:.0f} GiB"
        lines.append(
            f"cuda:{index} {properties.name}, {memory}, compute capability {properties.major}.{properties.minor}"
        )
    return lines
