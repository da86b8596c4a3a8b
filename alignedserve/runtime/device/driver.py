"""NVIDIA's driver: its version, and the build of PyTorch that it runs."""

import contextlib
from pathlib import Path

_DRIVER = Path("/sys/module/nvidia/version")
# The oldest drivers for a version of CUDA, by NVIDIA's table of minor version compatibility.
_OLDEST_DRIVERS = {13: 580, 12: 525}
_CUDA_12_INDEX = "https://download.pytorch.org/whl/cu126"  # PyTorch's builds for CUDA 12.6


def driver_version(file: Path = _DRIVER) -> str | None:
    """Return the version of NVIDIA's driver, as its module in the kernel tells; None: it does not."""
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace").strip() or None
    return None


def fitting_torch(driver: str | None, built_for: str | None, torch_version: str) -> str | None:
    """Return which build of PyTorch fits this driver, where the one that is installed needs a newer; else None.

    `built_for`: the version of CUDA that PyTorch is built for.
    """
    number = (driver or "").partition(".")[0]
    needed = _OLDEST_DRIVERS.get(int((built_for or "0").partition(".")[0]))
    if not number.isdigit() or needed is None or int(number) >= needed:
        return None
    remark = f"driver {driver} is older than {needed}, which CUDA {built_for} needs: update it"
    if int(number) < _OLDEST_DRIVERS[12]:
        return remark
    version = torch_version.partition("+")[0]
    return f"{remark}, or pip install torch=={version} --index-url {_CUDA_12_INDEX}"
