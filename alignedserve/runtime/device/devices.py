"""The devices of this machine: the choice for each worker, and reasons why no GPU is available."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch

from alignedserve.core.errors import ConfigError, DeviceLost
from alignedserve.runtime.device.cores import num_cores

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
_LONGEST_REASON = 300
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

    `auto` is the CPU here: what it means on this machine is for `device_check` to say, which replaces it.
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


def rank_devices(first: str, size: int) -> tuple[str, ...]:
    """Return the device of each of a worker's ranks: that of the first, and the GPUs behind it."""
    if not first.startswith(CUDA):
        return (first,) * size
    _, _, number = first.partition(":")
    return tuple(f"{CUDA}:{int(number or 0) + rank}" for rank in range(size))


def check_ranks(name: str, size: int) -> None:
    """Check that a worker finds devices for all its ranks, by engine.device. Raises ConfigError."""
    if size == 1:
        return
    if not name.startswith(CUDA):
        cores = num_cores()
        if size > cores:
            raise ConfigError(f"engine.tensor_parallel is {size}, but this machine has {cores} cores; set it lower")
        return
    (first,) = worker_devices(name, 1)
    devices, count = rank_devices(first, size), torch.cuda.device_count()
    if int(devices[-1].partition(":")[2]) >= count:
        raise ConfigError(
            f"engine.tensor_parallel is {size} from {devices[0]} on, but there are {count} GPUs here, and NCCL takes "
            "no two ranks on one GPU; set it lower"
        )
    firsts = [devices[0]] if ":" in name else [f"{CUDA}:{index}" for index in range(0, count - size + 1, size)]
    for one in firsts:
        check_alike(rank_devices(one, size))


def check_alike(devices: Sequence[str]) -> None:
    """Check that a worker's ranks would be on GPUs of one kind: all wait for the slowest. Raises ConfigError."""
    kinds = dict.fromkeys(torch.cuda.get_device_properties(device).name for device in devices)
    if len(kinds) > 1:
        raise ConfigError(
            f"engine.tensor_parallel: the ranks' GPUs ({', '.join(devices)}) are of different kinds: "
            f"{', '.join(kinds)}; leave out the odd ones by CUDA_VISIBLE_DEVICES"
        )


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


def used_by_others(device: torch.device) -> int:
    """Return the memory of a GPU that is not free before this process has allocated any; 0: it is no GPU."""
    if device.type != CUDA:
        return 0
    free, total = _CUDA.mem_get_info(device)
    return int(total) - int(free)


@contextlib.contextmanager
def working(device: torch.device) -> Iterator[None]:
    """Raise DeviceLost, naming the GPU and CUDA's own reason, where work on it fails within the context.

    After such an error every later call fails in this process, so that it has to end. Memory that is short is no such
    error.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        reason = (str(error.args[0] if error.args else "").strip().splitlines() or ["CUDA says no more"])[0][
            :_LONGEST_REASON
        ]
        raise DeviceLost(
            f"{device} stopped working ({reason}); this worker ends, and its requests go on elsewhere"
        ) from error


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
