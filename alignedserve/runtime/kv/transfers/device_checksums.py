"""Checksums of runs of blocks on a device, and the same computed on the host (`kernels.block_checksums`).

The key of a word depends on its place in the run and on the run's place in its request:

    (i + 1) * G + seed * S        i: number of the word in the run; seed: blocks of the request before the run

so a block, as a row of its own, has the key  (words of the run before it) * G + seed * S.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.kv.block_checksums import PlacedRun
from kernels.block_checksums import WORD_BYTES, G, checksum_on_host, row_checksums

_S = 0xD1B54A32D192ED03
_MASK = (1 << 64) - 1


class DeviceRunChecksums:
    """RunChecksums of rows on a device. The host waits for the device only when `values` is read."""

    def __init__(self, runs: Sequence[PlacedRun], block_bytes: int, device: torch.device) -> None:
        assert block_bytes % WORD_BYTES == 0, "blocks on a device are made of 8-byte words"
        num_words = block_bytes // WORD_BYTES
        # For every block in order: its run, and its key.
        self._runs = np.repeat(np.arange(len(runs)), [count for _, count in runs])
        keys = [(place * num_words * G + before * _S) & _MASK for before, count in runs for place in range(count)]
        self._keys = np.array(keys, np.uint64).view(np.int64)
        self._num_seen = 0
        self._totals = torch.zeros(len(runs), dtype=torch.int64, device=device)

    @property
    def values(self) -> list[int]:
        """One unsigned checksum per run, once all blocks were seen."""
        return [total & _MASK for total in self._totals.tolist()]

    def update(self, rows: Tensor) -> None:
        """Add the next blocks: uint8 [n, block_bytes], contiguous, on this device."""
        part = slice(self._num_seen, self._num_seen + len(rows))
        self._num_seen += len(rows)
        runs, keys = to_device([self._runs[part], self._keys[part]], self._totals.device)
        self._totals.index_add_(0, runs, row_checksums(rows, keys))


def run_checksum(run: npt.NDArray[np.uint8], num_before: int) -> int:
    """Compute the checksum of one run's bytes, uint8 [any, block_bytes], on the host: the reference."""
    return checksum_on_host(run, num_before * _S & _MASK)
