"""Host memory in pages of 2 MiB, where the kernel has them."""

import contextlib
import errno
import mmap

from alignedserve.runtime.device.host_memory.memory_maps import MADV_HUGEPAGE, MADV_POPULATE_WRITE


def huge_pages(size: int, *, populated_bytes: int) -> mmap.mmap:
    """Allocate memory on huge pages, which are copied faster and filled several times as fast.

    `populated_bytes`: so much of its beginning is there when it returns, the rest at its first write. Raises OSError.
    """
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
