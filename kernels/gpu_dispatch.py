"""The choice between GPU kernels (`kernels.gpu`) and plain PyTorch, without loading Triton where it is not needed."""

import importlib
import importlib.util
import logging
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Errors of a failed launch, besides Triton's own: no Triton or an old one, no driver, no C compiler (Triton builds its
# launchers with one), a GPU that is too old, not enough memory.
_FAILURES = (AttributeError, ImportError, OSError, RuntimeError, ValueError, subprocess.SubprocessError)
_LONGEST_REASON = 300

_can_launch: dict[str, bool] = {}  # whether a kernel can be launched, by name; tried once per process
_reasons: dict[str, str] = {}  # of failed launches, by name


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launch kernels on this device within the context, as Triton ignores the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gpu_kernels_available(device: torch.device) -> bool:
    """Return whether Triton runs here: on a GPU, or on a CPU in its interpreter (TRITON_INTERPRET=1), for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return True
    launching = importlib.import_module("kernels.gpu.launching")
    return device.type == "cpu" and bool(launching.is_interpreted())


def wants_fused_kernels(device: torch.device) -> bool:
    """Return whether to fuse several of PyTorch's operations into one kernel: on a GPU (and where tests patch this)."""
    return device.type == "cuda"


def fused_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Any | None:
    """Return the module `name` of kernels.gpu where its kernels are wanted and can be launched; None: use PyTorch."""
    if not wants_fused_kernels(device):
        return None

    def trial() -> None:
        with on_device(device):
            importlib.import_module(f"kernels.gpu.{name}").trial_launch(device, dtype)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    return importlib.import_module(f"kernels.gpu.{name}") if can_launch(f"{name} ({dtype})", trial) else None


def can_launch(name: str, trial: Callable[[], object]) -> bool:
    """Return whether a kernel can be launched here, by running `trial`, a tiny launch, once per `name` and process. A
    kernel that cannot be launched is logged once, with the reason."""
    if name not in _can_launch:
        reason = _obstacle(trial)
        _can_launch[name] = reason is None
        if reason is not None:
            _reasons[name] = reason
            logger.warning(
                "The GPU kernel %s does not run here, so PyTorch's own operations do its work, with the same results "
                "in more time. The reason: %s",
                name,
                reason,
            )
    return _can_launch[name]


def launch_failures() -> dict[str, str]:
    """Return the kernels of this process that failed to launch and were replaced by PyTorch, each with the reason."""
    return dict(_reasons)


def _obstacle(trial: Callable[[], object]) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    try:
        failures = (*_FAILURES, importlib.import_module("triton.errors").TritonError)
    except _FAILURES as error:
        return f"Triton cannot be loaded: {_line(error)}"
    try:
        trial()
    except failures as error:
        return _line(error)
    return None


def _line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:_LONGEST_REASON] if lines else 'no more is known'}"
