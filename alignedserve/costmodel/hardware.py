"""Accelerators by name: the figures of their datasheets."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
_A100 = Hardware(
    name="a100-80g",
    num_multiprocessors=108,
    memory_bytes=80 * _GIB,
    memory_bytes_per_s=2039e9,
    flops_per_s={"float16": 312e12, "bfloat16": 312e12, "float32": 19.5e12},
    pcie_bytes_per_s=32e9,
    nvlink_bytes_per_s=300e9,
)
_H100 = Hardware(
    name="h100",
    num_multiprocessors=132,
    memory_bytes=80 * _GIB,
    memory_bytes_per_s=3350e9,
    flops_per_s={"float16": 989e12, "bfloat16": 989e12, "float32": 67e12},
    pcie_bytes_per_s=64e9,
    nvlink_bytes_per_s=450e9,
)
_V100 = Hardware("v100-32g", 80, 32 * _GIB, 900e9, {"float16": 125e12, "float32": 15.7e12}, 16e9, 150e9)
_A100_40G = replace(_A100, name="a100-40g", memory_bytes=40 * _GIB, memory_bytes_per_s=1555e9)
_H200 = replace(_H100, name="h200", memory_bytes=141 * 10**9, memory_bytes_per_s=4800e9)
HARDWARE = {accelerator.name: accelerator for accelerator in (_V100, _A100_40G, _A100, _H100, _H200)}


def hardware(name: str) -> Hardware:
    """Return the accelerator of that name. Raises ConfigError listing the names."""
    if name not in HARDWARE:
        raise ConfigError(f"hardware {name!r} is none of {', '.join(HARDWARE)}.")
    return HARDWARE[name]


# Shares of the datasheet's rate. PCIe: what copies from pinned memory reach. NVLink: send_recv of 64 MiB between two
# accelerators, 228 GB/s of 300 on A100 and 348 of 450 on H100 (Vidur's measurements, see docs/costmodels.md).
_PCIE_SHARE = 0.8
_NVLINK_SHARE = 0.77
_PCIE_LATENCY_S = 10e-6  # starting one asynchronous copy
_NVLINK_LATENCY_S = 8e-6  # send_recv of 2 KiB, the same measurements

_LEARNED_WEIGHT = 1 / 8  # of the latest transfer in a link's running mean


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One way between two memories, one direction."""

    latency_s: float
    bytes_per_s: float

    def transfer_s(self, num_bytes: float) -> float:
        """Return the seconds until that many bytes have arrived; nothing takes no time."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


def pcie_link(machine: Hardware) -> LinkModel:
    """Return the link between an accelerator and the memory of its host: offload, swap, prefetch."""
    return LinkModel(_PCIE_LATENCY_S, _PCIE_SHARE * machine.pcie_bytes_per_s)


def nvlink_link(machine: Hardware) -> LinkModel:
    """Return the link between two accelerators of one machine: admission."""
    return LinkModel(_NVLINK_LATENCY_S, _NVLINK_SHARE * machine.nvlink_bytes_per_s)


class LearnedLinks:
    """The time that a block takes from one process to another, learned from the transfers themselves.

    All blocks of a cluster have one size. A link without a transfer so far counts as the mean of all; while there are
    none at all, every link costs nothing. Deterministic: the same observations in the same order give the same costs.
    """

    def __init__(self) -> None:
        self._block_s: dict[str, dict[str, float]] = {}  # by target, then source
        self._mean_s = 0.0

    def observe(self, target: str, source: str, num_blocks: int, seconds: float) -> None:
        """Learn from `num_blocks` that took `seconds` from `source` to `target`."""
        if num_blocks < 1:
            return
        block_s = seconds / num_blocks
        known = self._block_s.setdefault(target, {})
        known[source] = known.get(source, block_s) + (block_s - known.get(source, block_s)) * _LEARNED_WEIGHT
        self._mean_s += (block_s - self._mean_s) * (_LEARNED_WEIGHT if self._mean_s else 1.0)

    def seconds_per_block(self, target: str, source: str) -> float:
        return self._block_s.get(target, {}).get(source, self._mean_s)

    def forget(self, name: str) -> None:
        """Forget a process that is gone, as it may come back on another host."""
        self._block_s.pop(name, None)
        for known in self._block_s.values():
            known.pop(name, None)
