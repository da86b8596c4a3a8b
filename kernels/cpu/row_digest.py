"""The digest of a block of bytes: its rules, and the plain form that all others equal.

A block is cut into parts of 16 KiB, of which the last may be shorter. Parts are summed by XXH3 of 64 bits without a
seed (Yann Collet, https://xxhash.com), one of less than 256 bytes as if zeros followed it, and

    digest = sum over the parts k = 0, 1, ... of mix(XXH3(part k) ^ mix((k + 1) * PLACE))      modulo 2^64

with `mix` the end of MurmurHash3. XXH3 mixes each kilobyte with all before it: of a block of 2 MiB that would be 2 048
steps one after the other, which a GPU waits for behind every copy. Parts are summed side by side.

Nothing here loads torch."""

import functools

import numpy as np
import numpy.typing as npt
import xxhash

PART_BYTES = 16 << 10
LEAST_BYTES = 256  # of a part, that are summed
WORD_BYTES = 8
PLACE, MIX = 0x9E3779B97F4A7C15, (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_ALL = (1 << 64) - 1


def row_digest(block: npt.NDArray[np.uint8]) -> int:
    content = np.ascontiguousarray(block).data
    firsts = range(0, len(content), PART_BYTES)
    parts = [content[first : first + PART_BYTES] for first in firsts]
    if len(parts[-1]) < LEAST_BYTES:
        parts[-1] = memoryview(bytes(parts[-1]).ljust(LEAST_BYTES, b"\0"))
    places = _places(len(parts))
    return sum(_mix(xxhash.xxh3_64_intdigest(part) ^ index) for part, index in zip(parts, places, strict=True)) & _ALL


@functools.lru_cache(16)
def _places(count: int) -> tuple[int, ...]:
    return tuple(_mix(number * PLACE & _ALL) for number in range(1, count + 1))


def _mix(x: int) -> int:
    x = (x ^ x >> 32) * MIX[0] & _ALL
    x = (x ^ x >> 29) * MIX[1] & _ALL
    return x ^ x >> 32
