"""CUDA's driver: its library, the registration of host memory, and copies of many pieces at once.

The runtime's `cudaHostRegister` does the same, but what it refuses stays the last error of its thread, and PyTorch
raises that at the next launch, of whatever kernel. The driver's calls return their errors and keep none."""

import ctypes
import functools
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

logger = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"  # of the NVIDIA driver, not of PyTorch
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for all of the process's contexts
_Address = ctypes.c_void_p
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_Address), ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (_Address,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_Address),),
    "cuMemHostRegister_v2": (_Address, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (_Address,),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class CudaError(Exception):
    """A call that the driver refuses, with its reason."""


class CudaDriver:
    """The NVIDIA driver of one GPU of this process."""

    def __init__(self, device: int, library: Any = None) -> None:
        """`device`: the GPU's number among those that the process sees. `library`: libcuda; by default this host's."""
        self._device = device
        self._library = library

    def register(self, address: int, size: int) -> str | None:
        try:
            self._call("cuMemHostRegister_v2", address, size, _PORTABLE)
        except (CudaError, OSError, AttributeError) as error:  # the latter: there is no such library, or function
            return str(error)
        return None

    def unregister(self, address: int) -> None:
        try:
            self._call("cuMemHostUnregister", address)
        except CudaError as error:
            logger.error("memory stays registered: %s", error)

    def _call(self, name: str, *arguments: int) -> None:
        library = self._library or libcuda()
        handle, context = ctypes.c_int(), _Address()
        _check(library, library.cuDeviceGet(ctypes.byref(handle), self._device))
        _check(library, library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
        try:
            _check(library, library.cuCtxPushCurrent_v2(context))
            try:
                _check(library, getattr(library, name)(*arguments))
            finally:
                library.cuCtxPopCurrent_v2(ctypes.byref(context))
        finally:
            library.cuDevicePrimaryCtxRelease_v2(handle)


def _check(library: Any, code: int) -> None:
    if code == 0:
        return
    reason = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(reason))
    raise CudaError((reason.value or b"").decode(errors="replace") or f"error {code}")


@functools.cache
def libcuda() -> Any:
    """Load the driver's library, which PyTorch has loaded before. Raises OSError."""
    library = ctypes.CDLL(_LIBRARY)
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


Ints = npt.NDArray[np.int64]

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the source is read in its turn
_BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
# Bytes of one call, half a millisecond of a link: what other streams copy meanwhile, such as a step's tokens, waits no
# longer for an engine that takes a list as one piece.
_BYTES_OF_CALL = 32 << 20


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
        for row, there, count in zip(self.on_device.tolist(), self.on_host.tolist(), self.counts.tolist(), strict=True):
            yield slice(row, row + count), slice(there, there + count)

    def addresses(self, rows: Tensor, pinned: Tensor) -> tuple[Ints, Ints, Ints]:
        """Return where each run begins in rows and in pinned, both contiguous uint8 [any number, row_bytes], and its
        bytes. The driver is not asked whether runs are within them: they are checked here."""
        row_bytes = rows.shape[1]
        assert pinned.shape[1] == row_bytes, "rows of two sizes"
        for memory, firsts in ((rows, self.on_device), (pinned, self.on_host)):
            assert memory.is_contiguous(), "a copy with a tensor that is not contiguous"
            is_within = firsts.min() >= 0 and int((firsts + self.counts).max()) <= len(memory)
            assert is_within, "a run beyond the rows"
        on_device, on_host = rows.data_ptr() + self.on_device * row_bytes, pinned.data_ptr() + self.on_host * row_bytes
        return on_device, on_host, self.counts * row_bytes


class BatchedCopies:
    """Copies of many pieces of memory by one call of CUDA's driver, done by its copy engines without a kernel. PyTorch
    has no such call: a copy of its own costs the host some 30 microseconds, as much as a link needs for 2 MiB.
    Gathering the pieces first would take twice their bytes of the device's memory, and kernels would wait."""

    def __init__(self, function: Any, *, tells_failed: bool) -> None:
        """`tells_failed`: it has an argument more, as before CUDA 13: the copy that was refused."""
        self.is_refused = False
        self._function = function
        self._tells_failed = tells_failed

    def enqueue(self, sources: Ints, targets: Ints, sizes: Ints, stream: int) -> bool:
        """Copy pieces of memory, by addresses and bytes, on a stream of the thread's current device. Return False where
        the driver refuses, for whatever reason: then all of it must be copied by other means."""
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
        driver = _of(libcuda())
    except OSError:
        return None
    return None if driver is None or driver.is_refused else driver


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
