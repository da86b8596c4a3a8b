"""Whether the GPU kernels (`kernels.gpu`) can be used here, without loading Triton where nobody asked for them."""

import importlib
import importlib.util

import torch


def gpu_kernels_run(device: torch.device) -> bool:
    """On an NVIDIA GPU with Triton installed; on a CPU in Triton's interpreter (TRITON_INTERPRET=1), for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return True
    launching = importlib.import_module("kernels.gpu.launching")
    return device.type == "cpu" and bool(launching.is_interpreted())
