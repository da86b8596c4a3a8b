"""The block tables of a step's contexts, one after another, by the native kernel where it is built."""

from typing import Any

import numpy as np

from kernels.cpu.native import load_native
from kernels.gpu.work_partition import Int32Array, Int64Array

_native: Any = load_native("copy_entries")


def block_entries(block_tables: Int64Array, rows: Int64Array, widths: Int64Array) -> Int32Array:
    """Return the first `widths` blocks of each row's table, row after row: a new array."""
    if _native is None:
        return plain_block_entries(block_tables, rows, widths)
    entries = np.empty(int(widths.sum()), np.int32)
    _native.copy_entries(block_tables, rows, widths, entries)
    return entries


def plain_block_entries(block_tables: Int64Array, rows: Int64Array, widths: Int64Array) -> Int32Array:
    """Return the same, without the native kernel."""
    longest = int(widths.max(initial=0))
    is_entry = np.arange(longest) < widths[:, None]  # of the rows' tables, cut to the longest: no loop over rows
    return block_tables[rows, :longest][is_entry].astype(np.int32)
