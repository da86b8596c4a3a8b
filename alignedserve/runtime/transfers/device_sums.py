"""Checksums of blocks on a device, in plain torch operations, and the same computed on the host by numpy.

XXH3 would need the bytes on the host. Here every 8-byte word is mixed with a key of its place (in the run, and of the
run in its request) by multiply-and-shift rounds as MurmurHash3 ends with, and the mixed words are summed modulo 2^64:
one pass, any order, and equal on every device, as wrapping 64-bit integer arithmetic is exact everywhere. It finds what
goes wrong by accident (stale, torn, swapped and flipped bytes) and is no protection against somebody who chooses bytes;
nor is XXH3.

    k(i)   = (i + 1) * G + seed * S                        i: number of the word in the run
    m(x)   = x ^ (x >>> 32);  x *= C1;  x ^= x >>> 29;  x *= C2;  x ^= x >>> 32
    sum    = total of m(word(i) ^ m(k(i)))                 all modulo 2^64, >>> shifts zeros in
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.runtime.block_sums import PlacedRun
from alignedserve.runtime.device_arrays import to_device

WORD_BYTES = 8
_G, _S, _C1, _C2 = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_MASK = (1 << 64) - 1


class DeviceRunSums:
    """As RunSums, of rows that lie on a device. The host waits for the device only when `sums` is read."""

    def __init__(self, runs: Sequence[PlacedRun], block_bytes: int, device: torch.device) -> None:
        assert block_bytes % WORD_BYTES == 0, "blocks on a device are made of 8-byte words"
        self._words = block_bytes // WORD_BYTES
        self._num_runs = len(runs)
        # For every block in order: its run, the run's seed, the block's place in the run.
        self._of = [(index, before, place) for index, (before, count) in enumerate(runs) for place in range(count)]
        self._num_seen = 0
        self._totals = torch.zeros(len(runs), dtype=torch.int64, device=device)
        self._places = torch.arange(1, self._words + 1, dtype=torch.int64, device=device) * _signed(_G)

    @property
    def sums(self) -> list[int]:
        """One for each run, unsigned, once all blocks were seen."""
        return [total & _MASK for total in self._totals.tolist()]

    def update(self, rows: Tensor) -> None:
        """Take the next blocks: uint8 [n, block_bytes], contiguous, on this device."""
        device = self._totals.device
        of = self._of[self._num_seen : self._num_seen + len(rows)]
        self._num_seen += len(rows)
        runs, seeds, places = to_device([np.array(column, np.int64) for column in zip(*of, strict=True)], device)
        first = places * _signed(self._words * _G & _MASK) + seeds * _signed(_S)
        keys = self._places + first[:, None]
        mixed = _mix(rows.view(torch.int64) ^ _mix(keys))
        self._totals.index_add_(0, runs, mixed.sum(dim=1))


def run_sum(run: npt.NDArray[np.uint8], num_before: int) -> int:
    """The reference: the checksum of one run's bytes, uint8 [any, block_bytes], computed on the host."""
    words = np.ascontiguousarray(run).reshape(-1).view(np.uint64)
    keys = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(_G) + np.uint64(num_before * _S & _MASK)
    return int(_mix_numpy(words ^ _mix_numpy(keys)).sum(dtype=np.uint64))


def _mix(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 32)) * _signed(_C1)
    words = (words ^ _shifted(words, 29)) * _signed(_C2)
    return words ^ _shifted(words, 32)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Shift right with zeros coming in; torch's own shift repeats the sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _mix_numpy(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(32))) * np.uint64(_C1)
    words = (words ^ (words >> np.uint64(29))) * np.uint64(_C2)
    return words ^ (words >> np.uint64(32))


def _signed(constant: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return constant - (1 << 64) if constant >> 63 else constant
