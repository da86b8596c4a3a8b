"""Checks at the ends of a transfer: the blocks that a copy names, and the checksums of its runs.

Every run of neighbouring blocks carries a checksum. It is the sum of its blocks' digests, each mixed with the block's
place in the request, so that blocks cannot be swapped, nor runs. The digests need no places: blocks are summed in any
order and by any thread, and a request's runs may be other ones at each end of a copy that is summed once.

    checksum = sum over the run of mix(digest ^ mix((place + 1) * G))        modulo 2^64

`digest` is the block's (`kernels.cpu.row_digest`), `place` the number of blocks before it, `mix` the end of
MurmurHash3."""

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.runtime.kv.block_runs import BlockRuns, Ints, PlacedRuns, as_ids
from alignedserve.runtime.kv.shm_arena import NO_LEASE

logger = logging.getLogger(__name__)

Digests = npt.NDArray[np.uint64]

_MAX_GENERATION = 1 << 40  # of messages.fields.Count
_G, _C1, _C2 = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))
_ONE, _SHIFT_29, _SHIFT_32 = (np.uint64(number) for number in (1, 29, 32))


class RunChecksums:
    """Checksums of consecutive runs of blocks, from digests of the blocks, which come in order."""

    def __init__(self, runs: PlacedRuns) -> None:
        self._runs = runs
        self._digests: list[Digests] = []

    def add(self, digests: Digests) -> None:
        self._digests.append(digests)

    @property
    def values(self) -> list[int]:
        return run_checksums(np.concatenate([np.empty(0, np.uint64), *self._digests]), self._runs)


def run_checksums(digests: Digests, runs: PlacedRuns) -> list[int]:
    if not len(runs.counts):
        return []
    starts = np.cumsum(runs.counts) - runs.counts
    assert len(digests) == starts[-1] + runs.counts[-1], "a digest for every block"
    places = np.arange(len(digests)) + np.repeat(runs.num_before - starts, runs.counts)
    terms = _mix(digests ^ _mix((places.astype(np.uint64) + _ONE) * _G))
    sums: list[int] = np.add.reduceat(terms, starts).tolist()
    return sums


def joined_checksums(by_rank: Sequence[Sequence[int]]) -> list[int]:
    """Join the checksums that each rank has of its parts of the same runs; none can stand for another's."""
    words = np.array(by_rank, np.uint64).reshape(len(by_rank), -1)
    ranks = np.arange(1, len(words) + 1, dtype=np.uint64)[:, None]
    joined: list[int] = _mix(words ^ _mix(ranks * _G)).sum(axis=0, dtype=np.uint64).tolist()
    return joined


def _mix(words: Digests) -> Digests:
    words = (words ^ (words >> _SHIFT_32)) * _C1
    words = (words ^ (words >> _SHIFT_29)) * _C2
    return words ^ (words >> _SHIFT_32)


def check_target(block_ids: Ints, num_sent: int, generation: int, num_blocks: int) -> None:
    """Check that a request of `num_sent` blocks can be written there. Raises HandoffRejected."""
    if num_sent != len(block_ids):
        raise HandoffRejected("the lease has another number of blocks than the request")
    _check_bounds(block_ids, num_blocks)
    if len(set(block_ids.tolist())) != len(block_ids):
        raise HandoffRejected("the lease has a block twice")
    _check_generation(generation)


def source_blocks(copy: BlockCopy, *, layout: BlockLayout, num_targets: int, num_blocks: int) -> Ints:
    """Return the blocks that hold this copy, in order. Raises HandoffRejected when it is inconsistent."""
    _check_generation(copy.generation)
    runs = runs_of(copy)
    if not len(runs.counts) or runs.counts.min() < 1:
        raise HandoffRejected("the handoff has no blocks, or a run without any")
    if runs.num_blocks != layout.blocks_for(copy.context_len):
        raise HandoffRejected("the handoff's blocks do not match its context length")
    if runs.num_blocks > num_targets:
        raise HandoffRejected("the handoff has more blocks than were set aside for it")
    block_ids = runs.block_ids()
    _check_bounds(block_ids, num_blocks)
    return block_ids


def runs_of(copy: BlockCopy) -> BlockRuns:
    """Return the runs of a copy. Raises HandoffRejected for numbers that no block has."""
    return BlockRuns(as_ids([run.first_block for run in copy.runs]), as_ids([run.num_blocks for run in copy.runs]))


def runs_with_checksums(runs: BlockRuns, checksums: Sequence[int]) -> tuple[BlockRun, ...]:
    assert len(runs.firsts) == len(checksums), "a checksum for every run"
    return tuple(map(BlockRun, runs.firsts.tolist(), runs.counts.tolist(), checksums))


def verify_checksums(copy: BlockCopy, checksums: Sequence[int] | None) -> None:
    """Check that the received bytes equal the sent ones; None: nothing arrived. Raises HandoffRejected."""
    if checksums is None:
        raise HandoffRejected("the lease is no longer valid")
    if list(checksums) != [run.checksum for run in copy.runs]:
        raise HandoffRejected("the checksum of a block does not match its bytes")


def is_verified(copy: BlockCopy, checksums: Sequence[int] | None) -> bool:
    """Return whether the received checksums are this copy's (None: nothing arrived), logging why not."""
    try:
        verify_checksums(copy, checksums)
    except HandoffRejected as error:
        logger.warning("fetch of generation %d refused: %s", copy.generation, error)
        return False
    return True


def expand_runs(runs: Sequence[tuple[int, int]], num_blocks: int) -> Ints:
    """Return the blocks of runs received from a peer, in order. Raises HandoffRejected."""
    named = BlockRuns.named(runs)
    if len(named.counts) and (named.counts.min() < 1 or named.num_blocks > num_blocks):
        raise HandoffRejected("more blocks than there are, or runs without blocks")
    block_ids = named.block_ids()
    _check_bounds(block_ids, num_blocks)
    return block_ids


def _check_generation(generation: int) -> None:
    if not NO_LEASE < generation <= _MAX_GENERATION:
        raise HandoffRejected("the lease's generation is out of range")


def _check_bounds(block_ids: Ints, num_blocks: int) -> None:
    if len(block_ids) and (block_ids.min() < 0 or block_ids.max() >= num_blocks):
        raise HandoffRejected("the lease names a block outside the arena")
