"""The devices of this machine: the choice for each worker, and reasons why no GPU is available."""

import warnings
from typing import Any

import psutil
import torch

from alignedserve.core.errors import ConfigError

CPU, CUDA = "cpu", "cuda"
_MAX_GPUS = 64  # of one machine
_CUDA: Any = torch.cuda


def cuda_obstacle() -> str | None:
    """Return why no GPU can be used, in one line; None: one can. Takes no memory on it."""
    if torch.version.cuda is None:
        return "this PyTorch is built for CPUs alone; docs/gpu.md says how to install one with CUDA"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_gpu = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if has_gpu:
        return None
    # PyTorch only warns of a driver that is too old or does not respond.
    messages = [str(warning.message).strip().partition("\n")[0] for warning in caught]
    return messages[0][:300] if messages else "no NVIDIA GPU is visible here; does nvidia-smi show one?"


def worker_devices(name: str, num_workers: int) -> list[str]:
    """Return the device of each worker, by engine.device. Raises ConfigError saying why it is unavailable.

    `auto` is the CPU: the GPU path has not been measured on a GPU yet, so a GPU is used only on request.
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


def gpu_names(name: str) -> tuple[str, ...]:
    """Return the GPUs that workers may use, by engine.device; none: they compute on the CPU. Raises ConfigError."""
    devices = dict.fromkeys(worker_devices(name, _MAX_GPUS))
    return tuple(device for device in devices if device != CPU)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device."""
    if device.type == CUDA:
        free, _ = _CUDA.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


def use_device(device: torch.device) -> None:
    """Make it the current device of the calling thread.

    Otherwise that is the first GPU, and page-locked memory, which belongs to no device, would take a few hundred
    megabytes of it for each process that computes on another.
    """
    if device.type == CUDA and device.index is not None:
        _CUDA.set_device(device)


def describe_gpus() -> list[str]:
    """Describe each usable GPU in one line."""
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
