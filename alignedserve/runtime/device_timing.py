"""How long work on a device takes, measured there: the host only queues it."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kernels.gpu_choice import on_device

_CUDA: Any = torch.cuda


def median_seconds(work: Callable[[], object], device: torch.device, *, rounds: int = 9, warm_ups: int = 3) -> float:
    """Of some rounds, by the device's own clock where it has one."""
    with on_device(device):
        return _median_seconds(work, device, rounds, warm_ups)


def _median_seconds(work: Callable[[], object], device: torch.device, rounds: int, warm_ups: int) -> float:
    for _ in range(warm_ups):
        work()
    if device.type != "cuda":
        return statistics.median(_host_seconds(work) for _ in range(rounds))
    marks = [[_CUDA.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for before, after in marks:
        before.record()
        work()
        after.record()
    _CUDA.synchronize(device)
    return float(statistics.median(before.elapsed_time(after) / 1e3 for before, after in marks))


def _host_seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
