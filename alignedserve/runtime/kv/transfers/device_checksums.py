"""Checksums of runs of blocks on a device: digests are computed there, the same as the host's."""

import numpy as np
from torch import Tensor

from alignedserve.runtime.kv.block_checksums import run_checksums
from alignedserve.runtime.kv.block_runs import PlacedRuns
from kernels.block_digests import row_digests


class DeviceRunChecksums:
    """RunChecksums of rows on a device. The host waits for the device only when `values` is read."""

    def __init__(self, runs: PlacedRuns) -> None:
        self._runs = runs
        self._digests: list[Tensor] = []

    def update(self, rows: Tensor) -> None:
        """Add the next blocks: uint8 [n, block_bytes], contiguous, on one device."""
        self._digests.append(row_digests(rows))

    @property
    def values(self) -> list[int]:
        """One unsigned checksum per run, once all blocks were added."""
        digests = [one.cpu().numpy().view(np.uint64) for one in self._digests]
        return run_checksums(np.concatenate([np.empty(0, np.uint64), *digests]), self._runs)
