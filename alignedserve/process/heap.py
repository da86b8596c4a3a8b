"""Gives memory of this process back to the system that it keeps and does not need. On Linux; elsewhere none is."""

import contextlib
import ctypes
import mmap
import re
from pathlib import Path

_SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)")
_READ_ALONE = ("r--p", "r-xp")
_OWN = re.compile(r"(?:Anonymous|Swap): +(\d+) kB")


def give_free_memory_back() -> None:
    """Give back what the C library keeps of freed memory: tens of megabytes after a start."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other libraries have none
    if trim is not None:
        trim(0)


def forget_pages_of_files() -> None:
    """Forget the pages of libraries that only their loading has touched: of PyTorch's some fifty megabytes.

    They stay in the system's cache, and come back from there once they are touched. Kept are those that this process
    has written, as relocations are, whatever is forbidden since.
    """
    if not _SMAPS.exists():
        return
    libc = ctypes.CDLL(None)
    with contextlib.suppress(OSError):
        for start, end in unwritten_mappings(_SMAPS.read_text(encoding="utf-8", errors="replace")):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def unwritten_mappings(smaps: str) -> list[tuple[int, int]]:
    """Return the addresses at which files are mapped for reading alone, without a page of this process's own."""
    found: dict[tuple[int, int], None] = {}
    place = 0, 0
    for line in smaps.splitlines():
        if mapping := _MAPPING.match(line):
            place = int(mapping[1], 16), int(mapping[2], 16)
            if mapping[3] in _READ_ALONE and mapping[4].startswith("/"):
                found[place] = None
        elif (own := _OWN.match(line)) and int(own[1]):
            found.pop(place, None)
    return list(found)
