"""CUDA's driver itself: its library, and the registration of host memory by it.

The runtime's `cudaHostRegister` does the same, but what it refuses stays the last error of its thread, and PyTorch
raises that at the next launch, of whatever kernel. The driver's calls return their errors and keep none.
"""

import ctypes
import functools
import logging
from typing import Any

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
    """The NVIDIA driver, as one GPU of this process has it."""

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
