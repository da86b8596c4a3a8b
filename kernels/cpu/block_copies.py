"""Copies of listed blocks on the host, with a digest of each block, by the native kernel where it is built.

Digests are those of `kernels.cpu.row_digest`. Copying and summing is one pass: every byte of the source is read once,
so that a digest is of exactly the bytes that were written, whoever writes to the source meanwhile.

Nothing here loads torch: the KV pool does without it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.cpu.native import load_native
from kernels.cpu.row_digest import row_digest

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]

# More than a core's own cache: what is copied would be gone from it before it is read again, so it is written past it.
STREAMED_BYTES = 1 << 20

_native: Any = load_native("copy_with_digests")  # older builds have other digests


@dataclass(frozen=True, slots=True)
class BlockList:
    """Blocks of an array, in the order of their copies."""

    blocks: Bytes  # [num_blocks, block_bytes], contiguous
    block_ids: Ids  # [count], contiguous

    def __post_init__(self) -> None:
        assert self.blocks.ndim == 2, "blocks are rows of bytes"
        assert self.blocks.dtype == np.uint8, "blocks are rows of bytes"
        assert self.blocks.flags.c_contiguous, "blocks lie one behind the other"
        assert self.block_ids.ndim == 1, "block ids must be a flat list"
        assert self.block_ids.dtype == np.int64, "block ids are int64"

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def block_bytes(self) -> int:
        return int(self.blocks.shape[1])

    @property
    def num_bytes(self) -> int:
        """Bytes of all listed blocks."""
        return len(self) * self.block_bytes

    def part(self, first: int, last: int) -> "BlockList":
        """Return the blocks at these places of the list."""
        return BlockList(self.blocks, self.block_ids[first:last])


def all_rows(rows: Bytes) -> BlockList:
    """List all rows of an array, in order."""
    return BlockList(rows, np.arange(len(rows)))


def levels() -> tuple[str, ...]:
    """List the levels of the native kernel that run here, the best first; none: it is not built."""
    return () if _native is None else tuple(_native.block_copy_levels())


def copy_blocks(
    source: BlockList,
    target: BlockList,
    *,
    num_threads: int = 1,
    with_digests: bool = True,
    is_streamed: bool | None = None,
    level: str | None = None,
) -> Digests:
    """Copy as many blocks as both lists have, no target twice -> uint64 [count], their digests, or [0] without.

    `num_threads`: at most, this one included. `is_streamed`: written past the caches; None: if they are too many to
    stay there. `level`: one of `levels`, the best one by default. Raises ValueError for a block outside its array."""
    assert source.block_bytes == target.block_bytes, "blocks of one size"
    assert target.blocks.flags.writeable, "targets are written"
    digests = np.empty(len(source) if with_digests else 0, np.uint64)
    if _native is None:
        _copy_plainly(source, target, digests)
        return digests
    if is_streamed is None:
        is_streamed = source.num_bytes > STREAMED_BYTES
    _native.copy_with_digests(
        level or levels()[0],
        *_placed(source),
        *_placed(target),
        source.block_bytes,
        digests.ctypes.data if with_digests else 0,
        is_streamed,
        num_threads,
    )
    return digests


def digest_blocks(blocks: BlockList, *, num_threads: int = 1, level: str | None = None) -> Digests:
    """Compute the digests of blocks -> uint64 [count]. Raises ValueError for a block outside its array."""
    digests = np.empty(len(blocks), np.uint64)
    if _native is None:
        _check(blocks)
        digests[:] = [row_digest(blocks.blocks[block_id]) for block_id in blocks.block_ids.tolist()]
    else:
        placed = _placed(blocks)
        _native.digest_blocks(level or levels()[0], *placed, blocks.block_bytes, digests.ctypes.data, num_threads)
    return digests


def _placed(listed: BlockList) -> tuple[int, int, Ids]:
    return listed.blocks.ctypes.data, len(listed.blocks), np.ascontiguousarray(listed.block_ids)


def _copy_plainly(source: BlockList, target: BlockList, digests: Digests) -> None:
    if len(source) != len(target):
        raise ValueError("as many targets as sources")
    _check(source)
    _check(target)
    tensor = np.empty(source.block_bytes, np.uint8)  # that no other thread writes to
    pairs = zip(source.block_ids.tolist(), target.block_ids.tolist(), strict=True)
    for index, (read, written) in enumerate(pairs):
        np.copyto(tensor, source.blocks[read])
        np.copyto(target.blocks[written], tensor)
        if len(digests):
            digests[index] = row_digest(tensor)


def _check(listed: BlockList) -> None:
    ids = listed.block_ids
    if len(ids) and (ids.min() < 0 or ids.max() >= len(listed.blocks)):
        raise ValueError("a block outside its memory")
