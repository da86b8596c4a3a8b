"""Runs of neighbouring blocks, as arrays: lists of hundreds of blocks are checked in a few operations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import HandoffRejected
from alignedserve.core.ids import BlockId

Ints = npt.NDArray[np.int64]
BlockIds = Sequence[BlockId] | Ints


class PlacedRuns(NamedTuple):
    """Runs by their places in their requests."""

    num_before: Ints  # blocks of the request before each run
    counts: Ints

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.num_before.tolist(), self.counts.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """Runs of blocks with consecutive ids, in order."""

    firsts: Ints
    counts: Ints

    @classmethod
    def of(cls, block_ids: BlockIds, *, is_by_block: bool = False, cut_every: int | None = None) -> "BlockRuns":
        """Split a list of blocks into its runs (`is_by_block`: of one block each).

        `cut_every`: a run also ends in front of each multiple of this."""
        ids = as_ids(block_ids)
        if is_by_block:
            return cls(ids, np.ones(len(ids), np.int64))
        begins = np.ones(len(ids), np.bool_)
        np.not_equal(ids[1:], ids[:-1] + 1, out=begins[1:])
        if cut_every is not None:
            begins |= ids % cut_every == 0
        starts = np.flatnonzero(begins)
        counts = np.empty_like(starts)
        counts[:-1] = starts[1:] - starts[:-1]
        counts[-1:] = len(ids) - starts[-1:]
        return cls(ids[starts], counts)

    @classmethod
    def named(cls, runs: Sequence[tuple[int, int]]) -> "BlockRuns":
        """Return the runs that another process has named, as (first block, blocks). Raises HandoffRejected."""
        firsts, counts = zip(*runs, strict=True) if runs else ((), ())
        return cls(as_ids(firsts), as_ids(counts))

    @property
    def num_blocks(self) -> int:
        return int(self.counts.sum())

    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.firsts.tolist(), self.counts.tolist(), strict=True))

    def block_ids(self) -> Ints:
        """Return the blocks of all runs, in order. `num_blocks` must have been checked."""
        before = np.cumsum(self.counts) - self.counts
        return np.repeat(self.firsts - before, self.counts) + np.arange(self.num_blocks)

    def placed(self, num_before: int = 0) -> PlacedRuns:
        """Return the places of the runs in their request, which begin after its first `num_before` blocks."""
        return place_runs(self.counts, num_before)


def as_ids(block_ids: BlockIds | Sequence[int]) -> Ints:
    """Return a list of blocks as an array. Raises HandoffRejected for a number that no block has."""
    try:
        return np.asarray(block_ids, np.int64)
    except OverflowError as error:
        raise HandoffRejected("the lease names a block number that is out of range") from error


def place_runs(counts: Ints | Sequence[int], num_before: int = 0) -> PlacedRuns:
    """Return the places of consecutive runs of one request that begin after its first `num_before` blocks."""
    lengths = np.asarray(counts, np.int64)
    return PlacedRuns(np.cumsum(lengths) - lengths + num_before, lengths)


def join_placed(requests: Iterable[PlacedRuns]) -> PlacedRuns:
    nothing = np.empty(0, np.int64)
    num_before, counts = zip((nothing, nothing), *requests, strict=True)
    return PlacedRuns(np.concatenate(num_before), np.concatenate(counts))
