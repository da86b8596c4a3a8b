"""Copies of many pieces of memory by one call of CUDA's driver, which its copy engines do without any kernel.

PyTorch has no such call: a copy of its own costs the host some 30 microseconds, as much as a link needs for 2 MiB.
Gathering the pieces first costs the device's memory twice their bytes, and the kernels that compute meanwhile wait for
those that gather.
"""

import ctypes
import functools
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from alignedserve.runtime.device import cuda_driver

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the source is read in its turn
_BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
# Bytes of one call, half a millisecond of a link: what other streams copy meanwhile, such as a step's tokens, waits no
# longer for an engine that takes a list as one piece.
_BYTES_OF_CALL = 32 << 20
_Address = ctypes.c_void_p


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_place", ctypes.c_int * 2),
        ("target_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_ATTRIBUTES = _Attributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE)
_FROM_THE_FIRST = ctypes.c_size_t(0)  # the copies that the attributes are of
_LISTS = (_Address, _Address, _Address, ctypes.c_size_t, _Address, _Address, ctypes.c_size_t)


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


class BatchedCopies:
    """The call of one driver."""

    def __init__(self, function: Any, *, tells_failed: bool) -> None:
        """`tells_failed`: it has an argument more, as before CUDA 13: the copy that was refused."""
        self.is_refused = False
        self._function = function
        self._tells_failed = tells_failed

    def enqueue(self, sources: Ints, targets: Ints, sizes: Ints, stream: int) -> bool:
        """Copy pieces of memory, by addresses and bytes, on a stream of the thread's current device.

        Return False where the driver refuses, for whatever reason: then all of it must be copied by other means.
        """
        calls = (np.cumsum(sizes) - 1) // _BYTES_OF_CALL
        bounds = [0, *(np.flatnonzero(np.diff(calls)) + 1).tolist(), len(sizes)]
        parts = (slice(first, last) for first, last in pairwise(bounds))
        return all(self._call(sources[part], targets[part], sizes[part], stream) for part in parts)

    def _call(self, sources: Ints, targets: Ints, sizes: Ints, stream: int) -> bool:
        lists = (targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes))
        attributes = (ctypes.addressof(_ATTRIBUTES), ctypes.addressof(_FROM_THE_FIRST), 1)
        failed = ctypes.c_size_t()
        more = (ctypes.addressof(failed),) if self._tells_failed else ()
        code = self._function(*lists, *attributes, *more, stream)
        if code:
            self.is_refused = True
            logger.warning("CUDA's driver copies no lists of blocks (error %d): they are copied one by one", code)
        return not code


def batched_copies() -> BatchedCopies | None:
    """Return the driver's call; None: it has none (before CUDA 12.8), or has refused it."""
    try:
        found = _of(cuda_driver.libcuda())
    except OSError:
        return None
    return None if found is None or found.is_refused else found


@functools.cache
def _of(library: Any) -> BatchedCopies | None:
    for name, tells_failed in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        function = getattr(library, name, None)
        if function is None:
            continue
        if isinstance(library, ctypes.CDLL):
            more = (_Address,) if tells_failed else ()
            function.argtypes, function.restype = (*_LISTS, *more, _Address), ctypes.c_int
        return BatchedCopies(function, tells_failed=tells_failed)
    return None
