"""Time that bytes take from one memory to another."""

from dataclasses import dataclass

from alignedserve.costmodel.hardware import Hardware

# Shares of the datasheet's rate. PCIe: what copies from pinned memory reach. NVLink: send_recv of 64 MiB between two
# accelerators, 228 GB/s of 300 on A100 and 348 of 450 on H100 (Vidur's measurements, see docs/costmodels.md).
_PCIE_SHARE = 0.8
_NVLINK_SHARE = 0.77
_PCIE_LATENCY_S = 10e-6  # starting one asynchronous copy
_NVLINK_LATENCY_S = 8e-6  # send_recv of 2 KiB, the same measurements


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
