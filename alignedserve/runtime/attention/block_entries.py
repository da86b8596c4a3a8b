"""The block tables of a step's decodes, in one array: most entries are those of the step before."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alignedserve.runtime.attention.backend import Contexts
from alignedserve.runtime.attention.sequence_table import IntArray

Int32Array = npt.NDArray[np.int32]


class _Latest(NamedTuple):
    """What was asked for last."""

    version: int  # of the table
    rows: IntArray
    widths: IntArray
    entries: Int32Array  # never written again but for each row's last one


class DecodeEntries:
    """Knows the latest entries, as long as the same rows of the table decode."""

    def __init__(self, table: Contexts) -> None:
        self._table = table
        self._latest: _Latest | None = None

    def of(self, rows: IntArray, widths: IntArray) -> Int32Array:
        """Return the first blocks of each row's table, `widths` of them, at least one, row after row: a new array.

        Each row's last block is that of its next token, and may be lent: it is another in the next step. All others
        are the row's own, and stay so while the table's version does.
        """
        table, latest = self._table, self._latest
        entries = None
        if len(rows) and latest is not None and latest.version == table.version and np.array_equal(rows, latest.rows):
            entries = self._grown(latest, rows, widths)
        if entries is None:
            entries = all_entries(table.block_tables, rows, widths)
        self._latest = _Latest(table.version, rows, widths, entries)
        return entries

    def _grown(self, latest: _Latest, rows: IntArray, widths: IntArray) -> Int32Array | None:
        """Return the entries where each row has as many as last time, or one more; None: one has others."""
        added = widths - latest.widths
        if added.min() < 0 or added.max() > 1:
            return None
        blocks, ends = self._table.block_tables, np.cumsum(widths)
        grown = np.flatnonzero(added)
        if not len(grown):
            entries = latest.entries.copy()
        else:
            entries = np.insert(latest.entries, np.cumsum(latest.widths)[grown], 0)
            entries[ends[grown] - 2] = blocks[rows[grown], widths[grown] - 2]
        entries[ends - 1] = blocks[rows, widths - 1]
        return entries


def all_entries(block_tables: IntArray, rows: IntArray, widths: IntArray) -> Int32Array:
    """Return the first `widths` blocks of each row's table, row after row."""
    longest = int(widths.max(initial=0))
    is_entry = np.arange(longest) < widths[:, None]  # of the rows' tables, cut to the longest: no loop over rows
    return block_tables[rows, :longest][is_entry].astype(np.int32)
