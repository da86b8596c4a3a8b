"""The NVIDIA GPUs of this machine: a description, and remarks on what will not go well."""

import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any

from alignedserve.runtime.device.devices import cuda_obstacle, torch_cuda
from alignedserve.runtime.device.driver import driver_version

_LIBRARIES = ("triton", "flash-attn-4", "flash-attn", "transformers", "alignedserve")


def remarks(gpus: Sequence[Any]) -> list[str]:
    found = []
    slices = [index for index, gpu in enumerate(gpus) if _is_slice(gpu)]
    if slices:
        found.append(
            f"{', '.join(f'cuda:{index}' for index in slices)}: a slice of a GPU (MIG), of which a process sees one "
            "and which no other maps: one worker, nothing over cuda_ipc"
        )
    kinds = dict.fromkeys(str(gpu.name) for gpu in gpus)
    if len(kinds) > 1:
        found.append(
            f"GPUs of {len(kinds)} kinds ({', '.join(kinds)}): default sizes follow from the smallest memory and the "
            "slowest, CUDA_VISIBLE_DEVICES leaves some out"
        )
    return found


def machine_remarks() -> list[str]:
    """Return the remarks on the GPUs that are visible here; none without."""
    if cuda_obstacle() is not None:
        return []
    return remarks(visible_gpus())


def visible_gpus() -> list[Any]:
    """Return the GPUs that are visible here, as PyTorch describes them; it must be able to use them."""
    cuda = torch_cuda()
    return [cuda.get_device_properties(index) for index in range(cuda.device_count())]


def described(gpus: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what matters of GPUs. Plain JSON."""
    return [
        {
            "name": gpu.name,
            "memory_bytes": gpu.total_memory,
            "multiprocessors": gpu.multi_processor_count,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
        }
        for gpu in gpus
    ]


def machine_gpus() -> dict[str, Any]:
    """Return GPUs, driver and versions of what computes on them. Plain JSON."""
    import torch

    gpus = visible_gpus() if cuda_obstacle() is None else []
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "libraries": {name: version_of(name) for name in _LIBRARIES},
        "gpus": described(gpus),
        "remarks": remarks(gpus),
    }


def _is_slice(gpu: Any) -> bool:
    return "MIG" in str(gpu.name).split()


def version_of(distribution: str) -> str | None:
    """Return the version of a package that is installed; None: it is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
