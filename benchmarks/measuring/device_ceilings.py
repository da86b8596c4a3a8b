"""Ceilings of a device, measured on it: its memory, its arithmetic, its link with the host."""

from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.device.dtypes import dtype_name
from benchmarks.measuring.device_timing import DeviceTimer, Work
from benchmarks.measuring.results import DeviceCeilings


class CeilingSizes(NamedTuple):
    """Sizes of what is moved and multiplied."""

    memory_bytes: int  # larger than any cache
    host_bytes: int
    matrix_side: int


SIZES = {"cpu": CeilingSizes(256 << 20, 0, 2048), CUDA: CeilingSizes(2 << 30, 256 << 20, 8192)}
TOY_SIZES = CeilingSizes(1 << 20, 1 << 20, 64)


def measure_device_ceilings(
    device: torch.device, dtype: torch.dtype, timer: DeviceTimer, sizes: CeilingSizes | None = None
) -> DeviceCeilings:
    """Measure memory, matrix products and the link of a device. `dtype`: of the matrix product."""
    sizes = sizes or SIZES[device.type]
    copied, read = _memory_speeds(device, timer, sizes.memory_bytes)
    to_device, to_host = _link_speeds(device, timer, sizes.host_bytes)
    return DeviceCeilings(
        device=torch.cuda.get_device_name(device) if device.type == CUDA else "CPU",
        dtype=dtype_name(dtype),
        read_gb_per_s=read / 1e9,
        copy_gb_per_s=copied / 1e9,
        matrix_tflop_per_s=_matrix_rate(device, dtype, timer, sizes.matrix_side) / 1e12,
        host_to_device_gb_per_s=to_device,
        device_to_host_gb_per_s=to_host,
    )


def _memory_speeds(device: torch.device, timer: DeviceTimer, num_bytes: int) -> tuple[float, float]:
    """Return the bytes per second copied (read and written), and read.

    Of the ways to read, the fastest counts, a copy among them: what one reduction does not reach is not the memory's
    limit.
    """
    source, target = (torch.ones(num_bytes // 4, dtype=torch.float32, device=device) for _ in range(2))
    words = source.view(torch.int64)
    copy_s, *read_s = timer.by_turns([lambda: target.copy_(source), source.sum, source.amax, words.sum])
    copied = 2 * num_bytes / copy_s
    return copied, max(num_bytes / min(read_s), copied)


def _matrix_rate(device: torch.device, dtype: torch.dtype, timer: DeviceTimer, side: int) -> float:
    x, weight = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty(side, side, dtype=dtype, device=device)
    return 2 * side**3 / timer.seconds(lambda: torch.mm(x, weight.T, out=out))


def _link_speeds(device: torch.device, timer: DeviceTimer, num_bytes: int) -> tuple[float | None, float | None]:
    if device.type != CUDA:
        return None, None
    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    speeds = timer.by_turns([_copying(there, pinned), _copying(pinned, there)])
    return num_bytes / speeds[0] / 1e9, num_bytes / speeds[1] / 1e9


def _copying(target: Tensor, source: Tensor) -> Work:
    return lambda: target.copy_(source, non_blocking=True)
