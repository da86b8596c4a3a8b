"""Checks at the ends of a transfer: the blocks that a copy names, and the checksums of its runs.

Every run of neighbouring blocks carries an XXH3 checksum, seeded with the run's position in the request so that runs
cannot be swapped.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.errors import HandoffRejected
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.runtime.kv.shm_arena import NO_LEASE

Bytes = npt.NDArray[np.uint8]
PlacedRun = tuple[int, int]  # (blocks of the request before it, its blocks)

# Copied, then hashed while it is still in the core's own cache: memory is read once and written once.
_PIECE_BYTES = 640 * 1024
_MAX_GENERATION = 1 << 40  # of messages.links.Count


class RunChecksums:
    """Checksums of consecutive runs of blocks, whose bytes come in order and in pieces of any size."""

    def __init__(self, runs: Sequence[PlacedRun], block_bytes: int) -> None:
        self.values: list[int] = []
        self._hasher: xxhash.xxh3_64 | None = None
        self._remaining = iter(runs)
        self._block_bytes = block_bytes
        self._begin()

    def update(self, piece: Bytes) -> None:
        """Add the next bytes, uint8 [n]. All runs together must be at least that long."""
        while len(piece) > self._num_left:
            assert self._num_left, "more bytes than the runs have"
            start = self._num_left
            self._add(piece[:start])
            piece = piece[start:]
        if len(piece):
            self._add(piece)

    def _add(self, part: Bytes) -> None:
        """Add bytes of one run."""
        self._num_left -= len(part)
        if not self._num_left and self._hasher is None:  # a whole run at once
            self.values.append(xxhash.xxh3_64_intdigest(part.data, self._num_before))
            self._begin()
            return
        if self._hasher is None:
            self._hasher = xxhash.xxh3_64(seed=self._num_before)
        self._hasher.update(part.data)
        if not self._num_left:
            self.values.append(self._hasher.intdigest())
            self._begin()

    def _begin(self) -> None:
        self._num_before, count = next(self._remaining, (0, 0))
        self._num_left = count * self._block_bytes
        self._hasher = None


def place_runs(counts: Iterable[int]) -> list[PlacedRun]:
    """Return the runs of one request, each with the number of blocks before it."""
    runs = []
    num_before = 0
    for count in counts:
        runs.append((num_before, count))
        num_before += count
    return runs


def copy_rows(sources: Iterable[Bytes], targets: Iterable[Bytes], *checksums: RunChecksums, from_target: bool) -> None:
    """Copy block by block, updating checksums with the bytes that were read or, `from_target`, written."""
    # Targets first: their iterator, advanced past its end, copies the last staged rows to a device.
    for target, source in zip(targets, sources, strict=True):
        if len(source) <= _PIECE_BYTES:
            _copy_piece(source, target, checksums, from_target)
            continue
        for start in range(0, len(source), _PIECE_BYTES):
            piece = slice(start, start + _PIECE_BYTES)
            _copy_piece(source[piece], target[piece], checksums, from_target)


def _copy_piece(source: Bytes, target: Bytes, checksums: tuple[RunChecksums, ...], from_target: bool) -> None:
    np.copyto(target, source)
    for one in checksums:
        one.update(target if from_target else source)


def check_target(block_ids: Sequence[BlockId], num_sent: int, generation: int, num_blocks: int) -> None:
    """Check that a request of `num_sent` blocks can be written there. Raises HandoffRejected."""
    if num_sent != len(block_ids):
        raise HandoffRejected("the lease has another number of blocks than the request")
    _check_bounds(block_ids, num_blocks)
    if len(set(block_ids)) != len(block_ids):
        raise HandoffRejected("the lease has a block twice")
    _check_generation(generation)


def source_blocks(copy: BlockCopy, *, block_size: int, num_targets: int, num_blocks: int) -> list[BlockId]:
    """Return the blocks that hold this copy, in order. Raises HandoffRejected when it is inconsistent."""
    _check_generation(copy.generation)
    count = copy.num_blocks
    if not copy.runs or any(run.num_blocks < 1 for run in copy.runs):
        raise HandoffRejected("the handoff has no blocks, or a run without any")
    if count != blocks_for(copy.context_len, block_size):
        raise HandoffRejected("the handoff's blocks do not match its context length")
    if count > num_targets:
        raise HandoffRejected("the handoff has more blocks than were set aside for it")
    block_ids = [BlockId(run.first_block + offset) for run in copy.runs for offset in range(run.num_blocks)]
    _check_bounds(block_ids, num_blocks)
    return block_ids


def runs_with_checksums(runs: Sequence[tuple[int, int]], checksums: Sequence[int]) -> tuple[BlockRun, ...]:
    """Combine runs of neighbouring blocks with their checksums."""
    return tuple(BlockRun(first, count, checksum) for (first, count), checksum in zip(runs, checksums, strict=True))


def verify_checksums(copy: BlockCopy, checksums: Sequence[int] | None) -> None:
    """Check that the received bytes are those that were sent; None: nothing arrived. Raises HandoffRejected."""
    if checksums is None:
        raise HandoffRejected("the lease is no longer valid")
    if list(checksums) != [run.checksum for run in copy.runs]:
        raise HandoffRejected("a checksum does not hold")


def expand_runs(runs: Sequence[tuple[int, int]], num_blocks: int) -> list[BlockId]:
    """Return the blocks of runs received from a peer, in order. Raises HandoffRejected."""
    if any(count < 1 for _, count in runs) or sum(count for _, count in runs) > num_blocks:
        raise HandoffRejected("more blocks than there are, or runs without blocks")
    block_ids = [BlockId(first + offset) for first, count in runs for offset in range(count)]
    _check_bounds(block_ids, num_blocks)
    return block_ids


def _check_generation(generation: int) -> None:
    if not NO_LEASE < generation <= _MAX_GENERATION:
        raise HandoffRejected("not the generation of any lease")


def _check_bounds(block_ids: Sequence[BlockId], num_blocks: int) -> None:
    if any(not 0 <= block_id < num_blocks for block_id in block_ids):
        raise HandoffRejected("a block outside the arena")
