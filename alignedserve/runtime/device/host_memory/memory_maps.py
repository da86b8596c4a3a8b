"""Maps memory and advises the kernel on it by address, for which the module mmap has no functions."""

import ctypes
import os
from typing import Any

MAP_FIXED, PROT_NONE = 0x10, 0  # Python has no names for them
MADV_HUGEPAGE, MADV_POPULATE_WRITE, MADV_COLLAPSE = 14, 23, 25  # of Linux; others refuse them, with EINVAL
_FAILED = ctypes.c_void_p(-1).value


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, size]
    libc.madvise.argtypes = [ctypes.c_void_p, size, ctypes.c_int]
    return libc


_LIBC = _libc()


def map_memory(
    at: int | None, size: int, protection: int, flags: int, file_descriptor: int = -1, offset: int = 0
) -> int:
    """Map memory as mmap(2) does, and return its address. Raises OSError."""
    address: int = _LIBC.mmap(at, size, protection, flags, file_descriptor, offset)
    if address == _FAILED:
        raise _last_error()
    return address


def unmap_memory(at: int, size: int) -> None:
    _LIBC.munmap(at, size)


def advise(at: int, size: int, advice: int) -> None:
    """Tell the kernel how memory will be used, see madvise(2). Raises OSError."""
    if _LIBC.madvise(at, size, advice) != 0:
        raise _last_error()


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
