"""Accelerators by name: the figures of their datasheets."""

from collections.abc import Mapping
from dataclasses import dataclass

from alignedserve.core.errors import ConfigError

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator. Rates are the datasheet's peaks; the cost model knows which share of them is reached."""

    name: str
    num_multiprocessors: int
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]  # by dtype, dense
    pcie_bytes_per_s: float  # to host memory, each direction
    nvlink_bytes_per_s: float  # to the other accelerators of the machine together, each direction

    def peak_flops(self, dtype: str) -> float:
        """Return the peak of matrix multiplications in this dtype. Raises ConfigError where there is none."""
        if dtype not in self.flops_per_s:
            raise ConfigError(f"hardware {self.name!r} has no {dtype}; it has {', '.join(self.flops_per_s)}.")
        return self.flops_per_s[dtype]


# NVIDIA's datasheets, SXM boards: "V100 Tensor Core GPU" (January 2020), "A100 Tensor Core GPU" (June 2021), "H100
# Tensor Core GPU" (2023; its figures with sparsity halved), "H200 Tensor Core GPU" (2024). float32 without TF32. NVLink
# and PCIe: half of the datasheet's total of both directions.
_ACCELERATORS = (
    Hardware(
        name="v100-32g",
        num_multiprocessors=80,
        memory_bytes=32 * _GIB,
        memory_bytes_per_s=900e9,
        flops_per_s={"float16": 125e12, "float32": 15.7e12},
        pcie_bytes_per_s=16e9,
        nvlink_bytes_per_s=150e9,
    ),
    Hardware(
        name="a100-40g",
        num_multiprocessors=108,
        memory_bytes=40 * _GIB,
        memory_bytes_per_s=1555e9,
        flops_per_s={"float16": 312e12, "bfloat16": 312e12, "float32": 19.5e12},
        pcie_bytes_per_s=32e9,
        nvlink_bytes_per_s=300e9,
    ),
    Hardware(
        name="a100-80g",
        num_multiprocessors=108,
        memory_bytes=80 * _GIB,
        memory_bytes_per_s=2039e9,
        flops_per_s={"float16": 312e12, "bfloat16": 312e12, "float32": 19.5e12},
        pcie_bytes_per_s=32e9,
        nvlink_bytes_per_s=300e9,
    ),
    Hardware(
        name="h100",
        num_multiprocessors=132,
        memory_bytes=80 * _GIB,
        memory_bytes_per_s=3350e9,
        flops_per_s={"float16": 989e12, "bfloat16": 989e12, "float32": 67e12},
        pcie_bytes_per_s=64e9,
        nvlink_bytes_per_s=450e9,
    ),
    Hardware(
        name="h200",
        num_multiprocessors=132,
        memory_bytes=141 * 10**9,
        memory_bytes_per_s=4800e9,
        flops_per_s={"float16": 989e12, "bfloat16": 989e12, "float32": 67e12},
        pcie_bytes_per_s=64e9,
        nvlink_bytes_per_s=450e9,
    ),
)
HARDWARE = {accelerator.name: accelerator for accelerator in _ACCELERATORS}


def hardware(name: str) -> Hardware:
    """Return the accelerator of that name. Raises ConfigError listing the names."""
    if name not in HARDWARE:
        raise ConfigError(f"hardware {name!r} is none of {', '.join(HARDWARE)}.")
    return HARDWARE[name]
