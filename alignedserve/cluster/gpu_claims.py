"""Claims of GPUs: two clusters that one user starts on a host have a Ray each, and must not take the same GPU.

A claim is a lock on a file of the user's folder, named after the GPU, and ends with the process that holds it however
that ends. Clusters that join one Ray claim their GPUs there instead (`hosts/nodes/placement_group.py`).
"""

import fcntl
import os
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from alignedserve.core.errors import ResourceError

_CUDA: Any = torch.cuda


class GpusTaken(ResourceError):
    """Other clusters of this host have all GPUs that one may use."""


class GpuClaims:
    """The GPUs of one cluster; each is another's again when this is closed, or collected."""

    def __init__(self, gpus: tuple[str, ...] = (), descriptors: tuple[int, ...] = ()) -> None:
        """`descriptors`: of the locked files."""
        self.gpus = gpus
        self._finish = weakref.finalize(self, _close, descriptors)

    def close(self) -> None:
        """Give them back."""
        self._finish()


def claim_gpus(gpus: Sequence[str], folder: Path) -> GpuClaims:
    """Claim those of these GPUs that no other cluster has. Raises GpusTaken where others have all of them."""
    locks = ((gpu, _lock(folder / f"gpu-{_identity(gpu)}.lock")) for gpu in gpus)
    claimed = {gpu: descriptor for gpu, descriptor in locks if descriptor is not None}
    if gpus and not claimed:
        which = "other clusters on this host have every GPU" if len(gpus) > 1 else f"another cluster has {gpus[0]}"
        raise GpusTaken(f"{which}; stop them, serve all models in one cluster, or set engine.device=cpu")
    return GpuClaims(tuple(claimed), tuple(claimed.values()))


def _lock(path: Path) -> int | None:
    """Return the descriptor of the locked file, which no other process inherits; None: another holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _identity(gpu: str) -> str:
    """Return a name for the GPU that is the same whichever others a process sees."""
    properties = _CUDA.get_device_properties(torch.device(gpu))
    return re.sub(r"[^\w-]", "", str(getattr(properties, "uuid", gpu)))
