"""Which GPU kernels (`kernels.gpu`) are used here, without loading Triton where nobody asked for them."""

import importlib
import importlib.util
import logging
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

logger = logging.getLogger(__name__)

# What a launch that cannot be made raises, besides Triton's own errors: no Triton or an old one, no driver, no C
# compiler (Triton builds its launchers with one), a GPU that is too old, not enough memory.
_FAILURES = (AttributeError, ImportError, OSError, RuntimeError, ValueError, subprocess.SubprocessError)
_LONGEST_REASON = 300

_known: dict[str, bool] = {}  # which kernels work, by name; a process finds out once
_reasons: dict[str, str] = {}  # why the others do not


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """What is launched within goes to this device: Triton takes the thread's current one, wherever its tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gpu_kernels_available(device: torch.device) -> bool:
    """On an NVIDIA GPU with Triton installed; on a CPU in Triton's interpreter (TRITON_INTERPRET=1), for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return True
    launching = importlib.import_module("kernels.gpu.launching")
    return device.type == "cpu" and bool(launching.is_interpreted())


def wants_fused_kernels(device: torch.device) -> bool:
    """Whether kernels that do several of PyTorch's steps at once are wanted: on a GPU. Tests want them elsewhere."""
    return device.type == "cuda"


def fused_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Any | None:
    """The module `name` of kernels.gpu, where its kernels are wanted and work; None: plain PyTorch computes."""
    if not wants_fused_kernels(device):
        return None

    def trial() -> None:
        with on_device(device):
            importlib.import_module(f"kernels.gpu.{name}").trial_launch(device, dtype)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    return importlib.import_module(f"kernels.gpu.{name}") if can_launch(f"{name} ({dtype})", trial) else None


def can_launch(name: str, trial: Callable[[], object]) -> bool:
    """Whether a kernel can be launched here: what `trial`, a launch on next to nothing, came to when `name` was first
    asked for in this process. A kernel that cannot is named in the log once, with the reason."""
    if name not in _known:
        reason = _obstacle(trial)
        _known[name] = reason is None
        if reason is not None:
            _reasons[name] = reason
            logger.warning(
                "The GPU kernel %s does not run here, so PyTorch's own operations do its work, with the same results "
                "in more time. The reason: %s",
                name,
                reason,
            )
    return _known[name]


def launch_failures() -> dict[str, str]:
    """Kernels that this process wanted and whose work PyTorch's own operations do, each with the reason."""
    return dict(_reasons)


def _obstacle(trial: Callable[[], object]) -> str | None:
    """Why the trial failed, in one line; None: it did not."""
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
    """The first cause's name and the end of what it says: a compiler shows the source first."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:_LONGEST_REASON] if lines else 'no more is known'}"
