"""The block tables of a step's contexts, one after another, by the native kernel where it is built."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cpu.native import load_native
from kernels.gpu.attention.work_partition import Int32Array, Int64Array

_native: Any = load_native("place_contexts")


class BlockArrays(NamedTuple):
    """Contexts as the kernels read them: see kernels.gpu.blocks.BlockTables."""

    lengths: Int32Array  # [contexts]
    starts: Int32Array  # [contexts]
    is_reversed: npt.NDArray[np.int8]  # [contexts]
    entries: Int32Array


class TableArrays(NamedTuple):
    """The table of sequences whose contexts they are."""

    block_tables: Int64Array  # [rows, blocks]
    is_reversed: npt.NDArray[np.bool_]  # [rows]
    block_size: int
    scratch_block: int  # padding's; -1: there is no padding


def block_arrays(table: TableArrays, rows: Int64Array, lengths: Int64Array) -> BlockArrays:
    """Return the arrays of contexts of these lengths: of the table's rows, then of padding, one token each."""
    if _native is None:
        return plain_block_arrays(table, rows, lengths)
    places, flags = np.empty((2, len(lengths)), np.int32), np.empty(len(lengths), np.int8)
    num_entries = _native.place_contexts(lengths, rows, table.is_reversed, table.block_size, places, flags)
    entries = np.empty(num_entries, np.int32)
    _native.copy_entries(table.block_tables, rows, places, table.scratch_block, entries)
    return BlockArrays(places[0], places[1], flags, entries)


def plain_block_arrays(table: TableArrays, rows: Int64Array, lengths: Int64Array) -> BlockArrays:
    widths: Int64Array = -(-lengths // table.block_size)
    row_widths, num_padding = widths[: len(rows)], len(lengths) - len(rows)
    longest = int(row_widths.max(initial=0))
    is_entry = np.arange(longest) < row_widths[:, None]  # of the rows' tables, cut to the longest: no loop over rows
    entries = table.block_tables[rows, :longest][is_entry]
    return BlockArrays(
        lengths.astype(np.int32),
        (np.cumsum(widths) - widths).astype(np.int32),
        np.concatenate((table.is_reversed[rows], np.zeros(num_padding, np.bool_))).astype(np.int8),
        np.concatenate((entries, np.full(num_padding, table.scratch_block))).astype(np.int32),
    )
