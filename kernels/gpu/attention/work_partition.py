"""Partition of a decode batch's contexts over the programs of a GPU: evenly by tokens, across contexts.

A context is a run of tiles; the tiles of all contexts, one after another, are cut into as many equal runs as there are
programs. A run may end in the middle of one context and continue with the next, so one long context among many short
ones delays no other. Each piece of a context within a run is a *part*, whose result is merged with those of its
context.

Worked example: contexts of 5, 1 and 2 tiles and 4 programs: runs of 2 tiles; parts (context, tiles) are (0, 0-2),
(0, 2-4), (0, 4-5), (1, 0-1), (2, 0-2): program 2 has two of them.

The arrays have the same shapes for every batch of so many rows, so that a captured graph can be replayed with new ones.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cpu.native import load_native

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_native: Any = load_native("partition_work")


class WorkPartition(NamedTuple):
    """The assignment of parts to programs. Parts are in the order of their contexts, and within one of its tiles."""

    part_rows: Int32Array  # [num_programs + rows] the context of a part; 0 behind the last part
    part_firsts: Int32Array  # likewise, its first tile
    part_lasts: Int32Array  # likewise, behind its last tile
    program_parts: Int32Array  # [num_programs + 1] program p computes parts [program_parts[p], program_parts[p + 1])
    row_parts: Int32Array  # [rows + 1] the parts of a context, likewise

    @property
    def num_parts(self) -> int:
        return int(self.row_parts[-1])


def partition(
    lengths: Int64Array, *, tile: int, num_programs: int, window: int | None = None, is_chunked: bool = False
) -> WorkPartition:
    """Partition contexts of lengths [rows] tokens, each at least 1; the last `window` are read, in whole tiles.

    `is_chunked`: those since the last multiple of the window are read."""
    assert len(lengths), "nothing to divide"
    if _native is None:
        return plain_partition(lengths, tile=tile, num_programs=num_programs, window=window, is_chunked=is_chunked)
    num_rows = len(lengths)
    parts = np.zeros((3, num_programs + num_rows), np.int32)
    part_rows, part_firsts, part_lasts = parts
    program_parts, row_parts = np.empty(num_programs + 1, np.int32), np.empty(num_rows + 1, np.int32)
    _native.partition_work(lengths, tile, window or 0, is_chunked, parts, program_parts, row_parts)
    return WorkPartition(part_rows, part_firsts, part_lasts, program_parts, row_parts)


def plain_partition(
    lengths: Int64Array, *, tile: int, num_programs: int, window: int | None = None, is_chunked: bool = False
) -> WorkPartition:
    num_rows = len(lengths)
    assert lengths.min() >= 1, "an empty context"
    tiles = -(-lengths // tile)
    begins = None
    if window is not None:
        begins = first_read(lengths, window, is_chunked=is_chunked) // tile
    bounds = np.zeros(num_rows + 1, np.int64)  # of each context among all tiles
    np.cumsum(tiles if begins is None else tiles - begins, out=bounds[1:])
    runs = bounds[-1] * np.arange(num_programs + 1) // num_programs
    cuts = np.concatenate((runs, bounds[1:]))
    cuts.sort(kind="stable")  # two ascending runs, which it merges
    is_new = np.ones(len(cuts), np.bool_)
    np.not_equal(cuts[1:], cuts[:-1], out=is_new[1:])
    cuts = cuts[is_new]
    starts, stops = cuts[:-1], cuts[1:]
    rows = np.searchsorted(bounds[1:], starts, side="right")
    shift = bounds[rows] if begins is None else bounds[rows] - begins[rows]  # of a place among all tiles
    capacity = num_programs + num_rows
    return WorkPartition(
        part_rows=_padded(rows, capacity),
        part_firsts=_padded(starts - shift, capacity),
        part_lasts=_padded(stops - shift, capacity),
        program_parts=np.searchsorted(starts, runs).astype(np.int32),
        row_parts=np.searchsorted(starts, bounds).astype(np.int32),
    )


def first_read(lengths: Int64Array, window: int, *, is_chunked: bool) -> Int64Array:
    """Return the first token that the last one of each context reads, as `partition` has windows."""
    earliest: Int64Array = (lengths - 1) // window * window if is_chunked else np.maximum(lengths - window, 0)
    return earliest


def _padded(values: Int64Array, capacity: int) -> Int32Array:
    padded = np.zeros(capacity, np.int32)
    padded[: len(values)] = values
    return padded
