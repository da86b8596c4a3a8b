"""Checksums of blocks in place, one pass over their bytes in any order, equal on every device.

XXH3 would need the bytes on the host. Here every 8-byte word is mixed with a key of its place by multiply-and-shift
rounds as MurmurHash3 ends with, and the mixed words are summed modulo 2^64: wrapping integers are exact everywhere. It
detects accidental errors (stale, torn, swapped and flipped bytes); like XXH3, it does not protect against an attacker.

    m(x)   = x ^ (x >>> 32);  x *= C1;  x ^= x >>> 29;  x *= C2;  x ^= x >>> 32
    sum    = total of m(word(i) ^ m((i + 1) * G + key))           all modulo 2^64, >>> shifts zeros in
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.gpu_dispatch import fused_kernels, on_device

WORD_BYTES = 8
G, C1, C2 = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53


def row_checksums(rows: Tensor, keys: Tensor) -> Tensor:
    """Compute rows uint8 [count, any multiple of 8], contiguous; keys int64 [count], on the same device -> int64
    [count]."""
    kernels = fused_kernels("row_checksums", rows.device, rows.dtype)
    if kernels is not None:
        with on_device(rows.device):
            sums: Tensor = kernels.row_checksums(rows, keys)
        return sums
    words = rows.view(torch.int64)
    places = torch.arange(1, words.shape[1] + 1, dtype=torch.int64, device=rows.device) * signed(G)
    return _mix(words ^ _mix(places + keys[:, None])).sum(dim=1)


def checksum_on_host(row: npt.NDArray[np.uint8], key: int) -> int:
    """Compute the unsigned checksum of one row by numpy: the reference."""
    words = np.ascontiguousarray(row).reshape(-1).view(np.uint64)
    places = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(G) + np.uint64(key)
    return int(_mix_numpy(words ^ _mix_numpy(places)).sum(dtype=np.uint64))


def signed(constant: int) -> int:
    """Return the same 64 bits as a signed integer, as torch's int64 holds them."""
    return constant - (1 << 64) if constant >> 63 else constant


def _mix(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 32)) * signed(C1)
    words = (words ^ _shifted(words, 29)) * signed(C2)
    return words ^ _shifted(words, 32)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Shift right with zeros coming in; torch's own shift repeats the sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _mix_numpy(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(32))) * np.uint64(C1)
    words = (words ^ (words >> np.uint64(29))) * np.uint64(C2)
    return words ^ (words >> np.uint64(32))
