"""What a process does with the device that it computes on: memory, errors, the current one of a thread."""

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import psutil
import torch

from alignedserve.core.errors import DeviceLost, PeerLost
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.device.verdicts import accuse_suspects

_LONGEST_REASON = 300
_REFUSALS = {1: "invalid argument", 2: "out of memory"}  # of single calls, by CUDA's codes: what follows goes on
_CUDA: Any = torch.cuda

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


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

    After such an error every later call fails in this process, which has to end. Short memory, or a call refused for
    its arguments, is raised unchanged.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        if is_refusal(error):
            raise
        accuse_suspects()
        raise DeviceLost(
            f"{device} stopped working ({_reason(error)}); this worker ends, and its requests go on elsewhere"
        ) from error


@contextlib.contextmanager
def copying(device: torch.device) -> Iterator[None]:
    """Do as `working`, and raise PeerLost where CUDA refuses a copy within the context: its blocks are not there."""
    try:
        with working(device):
            yield
    except torch.AcceleratorError as error:
        raise PeerLost(f"{device} refuses a copy: {_reason(error)}") from error


def is_refusal(error: torch.AcceleratorError) -> bool:
    """Return whether the device has refused a single call, and works on."""
    code = getattr(error, "error_code", None)  # of PyTorch 2.9 and newer
    return code in _REFUSALS or any(f"CUDA error: {name}" in _reason(error) for name in _REFUSALS.values())


def _reason(error: torch.AcceleratorError) -> str:
    lines = str(error.args[0] if error.args else "").strip().splitlines()
    return (lines or ["CUDA says no more"])[0][:_LONGEST_REASON]


def in_inference_mode(work: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """Decorate what computes without gradients, for every step: the mode is entered where it is not on already."""

    @wraps(work)
    def run(*args: P.args, **more: P.kwargs) -> ResultT:
        if torch.is_inference_mode_enabled():
            return work(*args, **more)
        with torch.inference_mode():
            return work(*args, **more)

    return run


def use_device(device: torch.device) -> None:
    """Make it the current device of the calling thread.

    Otherwise that is the first GPU, and page-locked memory, which belongs to no device, would take a few hundred
    megabytes of it for each process that computes on another.
    """
    if device.type == CUDA and device.index is not None:
        _CUDA.set_device(device)


def synchronize(device: torch.device) -> None:
    """Return when all work on the device is done."""
    if device.type == CUDA:
        _CUDA.synchronize(device)
