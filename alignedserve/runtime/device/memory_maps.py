"""Mappings of files in a memory file system on pages of 2 MiB, whatever the system's setting for shared memory.

That setting (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`) is `never` almost everywhere, and forbids only pages
that the kernel would choose by itself. A program may ask for a range to be collapsed into huge pages (MADV_COLLAPSE,
Linux 6.1), which only `deny` refuses, while other processes use it."""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from kernels.cpu.unnamed_files import take_space

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


HUGE_PAGE = 2 << 20
_SLICE_BYTES = 16 << 20  # at a time
_BUSY_TRIES = 3


def map_file(file_descriptor: int, size: int) -> Any:
    """Map a file from its beginning, shared, where huge pages fit; return a buffer of so many bytes. Raises OSError.
    The file is unmapped when the buffer and all views of it are garbage-collected; until then the mapping keeps the
    file and its lock. The descriptor stays the caller's."""
    reserved_bytes = size + HUGE_PAGE
    reserved = map_memory(None, reserved_bytes, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    at = -(-reserved // HUGE_PAGE) * HUGE_PAGE
    try:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        map_memory(at, size, protection, mmap.MAP_SHARED | MAP_FIXED, file_descriptor)
    except OSError:
        unmap_memory(reserved, reserved_bytes)
        raise
    content = (ctypes.c_uint8 * size).from_address(at)
    # With the address range reserved around it.
    unmapping = weakref.finalize(content, unmap_memory, reserved, reserved_bytes)
    unmapping.atexit = False  # views may be in use by other threads till the process is gone
    return content


def take_pages(
    file_descriptor: int, content_of: Callable[[], Any], size: int, note: Callable[[int], None] | None = None
) -> threading.Thread | None:
    """Take the memory of a mapped file; a thread puts it on huge pages beside the caller, content and all. A kernel
    takes 256 MiB of small pages in 0.1 s. Huge pages cost some virtual machines 1 to 6 s, for which a cluster without
    its only pool would wait. `content_of`: the mapping; None once it is not needed. `note`: gets the bytes on huge
    pages. Raises OSError when there is not enough memory."""
    take_space(file_descriptor, 0, size)
    if size < HUGE_PAGE:
        return None
    thread = threading.Thread(target=_collapse, args=(content_of, size, note), daemon=True)
    thread.start()
    return thread


def _collapse(content_of: Callable[[], Any], size: int, note: Callable[[int], None] | None) -> None:
    num_huge, end = 0, size // HUGE_PAGE * HUGE_PAGE
    for first in range(0, end, _SLICE_BYTES):
        if (content := content_of()) is None:
            return
        at, count = ctypes.addressof(content) + first, min(_SLICE_BYTES, end - first)
        num_huge += _is_collapsed(at, count) * count
        del content  # it may be unmapped from here on
        if not num_huge:
            break
    if note is not None:
        note(num_huge)


def _is_collapsed(at: int, size: int) -> bool:
    for _ in range(_BUSY_TRIES):
        try:
            advise(at, size, MADV_COLLAPSE)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return False
        else:
            return True
    return False


def huge_pages(size: int, *, populated_bytes: int) -> mmap.mmap:
    """Allocate memory on huge pages, which are copied faster and filled several times as fast.

    `populated_bytes`: taken at once, from the beginning; the rest is taken at its first write. Raises OSError."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(MADV_HUGEPAGE)
    if populated_bytes:
        try:
            memory.madvise(MADV_POPULATE_WRITE, 0, min(populated_bytes, size))
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel before 5.14
                raise
    return memory
