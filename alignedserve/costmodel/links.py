"""Time that bytes take from one memory to another."""

from dataclasses import dataclass

from alignedserve.costmodel.hardware import Hardware

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
