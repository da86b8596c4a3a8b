"""Runs of rows that lie side by side in a device's memory and in the host's: what one copy reaches."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int64]


class RowRuns(NamedTuple):
    """First rows of each run on either side, and its rows: int64 [num_runs]."""

    on_device: Ints
    on_host: Ints
    counts: Ints

    @classmethod
    def of(cls, on_device: Ints, on_host: Ints, *, cut_every: int | None = None) -> "RowRuns":
        """Join rows that are neighbours on both sides. `cut_every`: so many rows of the host were registered at once,
        over whose end no copy may reach."""
        begins = np.ones(len(on_device), np.bool_)
        begins[1:] = (np.diff(on_device) != 1) | (np.diff(on_host) != 1)
        if cut_every is not None:
            begins |= on_host % cut_every == 0
        firsts = np.flatnonzero(begins)
        return cls(on_device[firsts], on_host[firsts], np.diff(firsts, append=len(on_device)))

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows of each run: the device's and the host's."""
        for own, there, count in zip(self.on_device.tolist(), self.on_host.tolist(), self.counts.tolist(), strict=True):
            yield slice(own, own + count), slice(there, there + count)

    def addresses(self, rows: Tensor, pinned: Tensor) -> tuple[Ints, Ints, Ints]:
        """Return where each run begins in rows and in pinned, both contiguous uint8 [any number, row_bytes], and its
        bytes. The driver is not asked whether runs are within them: they are checked here."""
        row_bytes = rows.shape[1]
        assert pinned.shape[1] == row_bytes, "rows of two sizes"
        for memory, firsts in ((rows, self.on_device), (pinned, self.on_host)):
            assert memory.is_contiguous(), "a copy with a tensor that is not contiguous"
            is_within = firsts.min() >= 0 and int((firsts + self.counts).max()) <= len(memory)
            assert is_within, "a run beyond the rows"
        own, there = rows.data_ptr() + self.on_device * row_bytes, pinned.data_ptr() + self.on_host * row_bytes
        return own, there, self.counts * row_bytes
